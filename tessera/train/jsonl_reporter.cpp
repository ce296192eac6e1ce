#include "tessera/train/jsonl_reporter.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::train {
namespace {

constexpr std::string_view kBegin = "{\"step\":";

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

/// Truncates the file before the first line that the new run writes again. Also drops an incomplete last line, which an interrupted run has
/// left.
void keep_before(const std::filesystem::path& path, const ReporterOptions& options) {
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return;  // the path is a pipe or a device, or does not exist
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return;  // opening it for writing will report the error
  uintmax_t kept = 0;
  int64_t number = 1;
  for (std::string line; std::getline(stream, line) && !stream.eof(); number++) {
    const auto found = line.starts_with(kBegin) ? leading_number(std::string_view(line).substr(kBegin.size())) : std::nullopt;
    if (!found) {
      throw IoError("line {} of {} is not a line of metrics ('{}'), so this run can't continue the file; name another file", number, path,
                    printable(line.substr(0, 40)));
    }
    if (is_made_again(*found, options, [&](const auto& name) { return line.find(',' + json_text(name) + ':') != std::string::npos; }))
      break;
    kept += line.size() + 1;
  }
  try {
    std::filesystem::resize_file(path, kept);
  } catch (const std::filesystem::filesystem_error& error) {
    throw IoError("can't shorten the metrics file {}: {}", path, error.what());
  }
}

}  // namespace

JsonlReporter::JsonlReporter(std::filesystem::path path, const ReporterOptions& options) : path_(std::move(path)) {
  if (options.rank != 0) return;
  make_folders_for(path_);
  if (options.first_step > 0) keep_before(path_, options);
  file_ = open_report(path_, O_APPEND | (options.first_step > 0 ? 0 : O_TRUNC));
}

void JsonlReporter::write(int64_t step, const Values& values) {
  if (!file_) return;
  expect_names(path_, step, values);
  auto line = fmt::format("{}{}", kBegin, step);
  for (const auto& [name, value, unit] : values)
    line += fmt::format(",{}:{}", json_text(name), std::isfinite(value) ? shortest_text(value) : "null");
  write_report(file_, path_, step, line + "}\n");
}

}  // namespace tessera::train
