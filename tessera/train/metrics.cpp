#include "tessera/train/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

constexpr std::string_view kBegin = "{\"step\":";

std::optional<int64_t> step_of(std::string_view line) {
  if (!line.starts_with(kBegin)) return std::nullopt;
  int64_t step = 0;
  const auto result = std::from_chars(line.data() + kBegin.size(), line.data() + line.size(), step);
  return result.ec == std::errc() ? std::optional(step) : std::nullopt;
}

/// Truncates the file before the first line of `step` or a later step. Also drops an incomplete last line, which an interrupted run has
/// left.
void keep_before(const std::filesystem::path& path, int64_t step) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return;  // it does not exist, or opening it for writing will report the error
  uintmax_t kept = 0;
  int64_t number = 1;
  for (std::string line; std::getline(stream, line) && !stream.eof(); number++) {
    const auto found = step_of(line);
    if (!found) {
      throw IoError(fmt::format("line {} of {} is not one of metrics ('{}'), so this run does not go on in that file; name another one",
                                number, path.string(), line.substr(0, 40)));
    }
    if (*found >= step) break;
    kept += line.size() + 1;
  }
  std::filesystem::resize_file(path, kept);
}

std::string json_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < ' ') {
      result += fmt::format("\\u{:04x}", static_cast<int>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

/// The shortest text of a number. A number that is a float is written with the precision of a float: 0.1, not 0.10000000149011612.
std::string number_text(double number) {
  if (!std::isfinite(number)) return "null";
  const auto as_float = static_cast<float>(number);
  return static_cast<double>(as_float) == number ? fmt::format("{}", as_float) : fmt::format("{}", number);
}

}  // namespace

MetricsFile::MetricsFile(std::filesystem::path path, const MetricsOptions& options) : path_(std::move(path)), step_(options.first_step) {
  if (options.rank != 0) return;
  try {
    if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path());
    if (step_ > 0) keep_before(path_, step_);
  } catch (const std::filesystem::filesystem_error& error) {
    throw IoError(fmt::format("can't prepare the metrics file {}: {}", path_.string(), error.what()));
  }
  const int fresh = step_ > 0 ? 0 : O_TRUNC;
  file_ = Fd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | fresh, 0666));
  if (!file_) throw IoError(fmt::format("can't open the metrics file {}: {}", path_.string(), std::strerror(errno)));
  // The step before the first one is allowed, so that the last step of an earlier run may get another line.
  step_ = std::max<int64_t>(0, step_ - 1);
}

void MetricsFile::write(int64_t step, const Values& values) {
  if (!file_) return;
  if (step < step_) {
    throw UsageError(fmt::format("step {} comes after step {} in the metrics file {}; steps are written in order, from first_step on", step,
                                 step_, path_.string()));
  }
  step_ = step;
  auto line = fmt::format("{}{}", kBegin, step);
  for (const auto& [name, value] : values) line += fmt::format(",{}:{}", json_text(name), number_text(value));
  line += "}\n";
  for (std::string_view rest = line; !rest.empty();) {
    const auto count = ::write(file_.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw IoError(fmt::format("can't write step {} to the metrics file {}: {}", step, path_.string(), std::strerror(errno)));
    rest.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace tessera::train
