#include "tessera/base/error_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tessera/base/env.h"
#include "tessera/base/fd.h"

namespace tessera {
namespace {

/// Returns the message of a record, or the whole text if it is not a record.
std::string message_in(const std::string& text) {
  const auto record = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object() || !record.contains("message")) return text;
  const auto& outer = record["message"];  // a text, or an object that contains the text
  const auto& message = outer.is_object() && outer.contains("message") ? outer["message"] : outer;
  return message.is_string() ? message.get<std::string>() : text;
}

}  // namespace

void record_error(std::string_view message) noexcept try {
  const auto path = env(kErrorFile);
  if (!path) return;
  const Fd file(::open(path->c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  struct stat status = {};
  if (!file || ::fstat(file.get(), &status) != 0 || status.st_size > 0) return;
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  // torchrun reads the seconds as a text, and shows py_callstack, which in Python's records has the traceback.
  const nlohmann::json more = {{"py_callstack", message}, {"timestamp", std::to_string(now.count())}};
  const nlohmann::json record = {{"message", {{"message", message}, {"extraInfo", more}}}};
  const auto text = record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  [[maybe_unused]] const auto written = ::write(file.get(), text.data(), text.size());
} catch (const std::exception&) {  // without a record, the launcher repeats the last output of the rank
}

std::optional<ErrorRecord> read_error_record(const std::filesystem::path& file) {
  struct stat status = {};
  std::ifstream stream(file);
  if (!stream || ::stat(file.c_str(), &status) != 0) return std::nullopt;
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (text.empty()) return std::nullopt;
  const auto since_epoch = std::chrono::seconds(status.st_mtim.tv_sec) + std::chrono::nanoseconds(status.st_mtim.tv_nsec);
  return ErrorRecord{.message = message_in(text), .when = std::chrono::system_clock::time_point(since_epoch)};
}

}  // namespace tessera
