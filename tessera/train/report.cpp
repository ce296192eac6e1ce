#include "tessera/train/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::train {

// The step before the first one is allowed, so that the last step of an earlier run may get another report.
ReportRules::ReportRules(std::filesystem::path path, int64_t first_step)
    : path_(std::move(path)), step_(std::max<int64_t>(0, first_step - 1)) {}

void ReportRules::check(int64_t step, const Values& values) {
  if (step < step_) {
    throw UsageError(
        fmt::format("step {} comes after step {} in {}; steps are reported in order, from first_step on", step, step_, path_.string()));
  }
  for (auto value = values.begin(); value != values.end(); ++value) {
    const auto& name = value->name;
    if (name.empty() || name == "step" || !is_utf8(name)) {
      throw UsageError(fmt::format("a value of step {} for {} can't be called '{}'; a name is a UTF-8 text, and not 'step', which is there",
                                   step, path_.string(), printable(name)));
    }
    if (std::ranges::find(values.begin(), value, name, &Value::name) == value) continue;
    throw UsageError(
        fmt::format("two values of step {} for {} are called '{}'; give each a name of its own", step, path_.string(), printable(name)));
  }
  step_ = step;
}

void make_folders_for(const std::filesystem::path& file) try {
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path());
} catch (const std::filesystem::filesystem_error& error) {
  throw IoError(fmt::format("no folder can be made for the metrics file {}: {}", file.string(), error.what()));
}

Fd open_report(const std::filesystem::path& path, int flags) {
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666));
  if (!file) throw IoError(fmt::format("can't open the metrics file {}: {}", path.string(), std::strerror(errno)));
  return file;
}

void write_report(const Fd& file, const std::filesystem::path& path, int64_t step, std::string_view text, std::optional<off_t> offset) {
  while (!text.empty()) {
    const auto count = offset ? ::pwrite(file.get(), text.data(), text.size(), *offset) : ::write(file.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw IoError(fmt::format("can't write step {} to the metrics file {}: {}", step, path.string(), std::strerror(errno)));
    text.remove_prefix(static_cast<size_t>(count));
    if (offset) *offset += count;
  }
}

std::string shortest_text(double number) {
  const auto as_float = static_cast<float>(number);
  return static_cast<double>(as_float) == number ? fmt::format("{}", as_float) : fmt::format("{}", number);
}

std::optional<int64_t> leading_number(std::string_view text) {
  int64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  return result.ec == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace tessera::train
