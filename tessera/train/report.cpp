#include "tessera/train/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::train {

void expect_names(const std::filesystem::path& path, int64_t step, const Values& values) {
  for (auto value = values.begin(); value != values.end(); ++value) {
    const auto& name = value->name;
    if (name.empty() || name == "step" || !is_utf8(name)) {
      throw UsageError("a value of step {} for {} can't be called '{}'; choose a UTF-8 text other than 'step', which is taken", step, path,
                       printable(name));
    }
    if (std::ranges::find(values.begin(), value, name, &Value::name) == value) continue;
    throw UsageError("two values of step {} for {} are called '{}'; give each a name of its own", step, path, printable(name));
  }
}

bool is_made_again(int64_t step, const ReporterOptions& options, c10::function_ref<bool(const std::string& name)> has) {
  for (const auto& [name, first] : options.first_of) {
    if (has(name)) return step >= first;
  }
  return step >= options.first_step;
}

void make_folders_for(const std::filesystem::path& file) try {
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path());
} catch (const std::filesystem::filesystem_error& error) {
  throw IoError("can't make the folder of the metrics file {}: {}", file, error.what());
}

Fd open_report(const std::filesystem::path& path, int flags) {
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666));
  if (!file) throw IoError("can't open the metrics file {}: {}", path, std::strerror(errno));
  return file;
}

void write_report(const Fd& file, const std::filesystem::path& path, int64_t step, std::string_view text) {
  while (!text.empty()) {
    const auto count = ::write(file.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw IoError("can't write step {} to the metrics file {}: {}{}", step, path, std::strerror(errno),
                    errno == ENOSPC ? "; make room, or name a file on another disk, and resume" : "");
    }
    text.remove_prefix(static_cast<size_t>(count));
  }
}

std::string shortest_text(double number) {
  if (std::isnan(number)) return "nan";  // without the sign, which fmt writes
  const auto as_float = static_cast<float>(number);
  return static_cast<double>(as_float) == number ? fmt::format("{}", as_float) : fmt::format("{}", number);
}

std::optional<int64_t> leading_number(std::string_view text) {
  int64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  return result.ec == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace tessera::train
