#include "tessera/train/csv_reporter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::train {
namespace {

constexpr std::string_view kStep = "step";

std::string field_text(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string result = "\"";
  for (const char c : text) result += c == '"' ? "\"\"" : std::string(1, c);
  return result + '"';
}

/// Removes the first record from the text and returns its fields; nothing if the record has no end.
std::optional<std::vector<std::string>> take_record(std::string_view& text) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (size_t i = 0; i < text.size(); i++) {
    const char c = text[i];
    if (c == '"') {
      const bool is_letter = quoted && i + 1 < text.size() && text[i + 1] == '"';
      if (is_letter) fields.back() += text[i++];
      if (!is_letter) quoted = !quoted;
    } else if (quoted) {
      fields.back() += c;
    } else if (c == ',') {
      fields.emplace_back();
    } else if (c == '\n') {
      text.remove_prefix(i + 1);
      return fields;
    } else if (c != '\r') {
      fields.back() += c;
    }
  }
  return std::nullopt;
}

std::string number_text(double number) {
  if (std::isnan(number)) return "nan";
  return std::isfinite(number) ? shortest_text(number) : number > 0 ? "inf" : "-inf";
}

}  // namespace

CsvReporter::CsvReporter(std::filesystem::path path, const ReporterOptions& options) : path_(std::move(path)) {
  if (options.rank != 0) return;
  make_folders_for(path_);
  std::error_code unknown;
  if (const auto there = std::filesystem::status(path_, unknown); std::filesystem::is_other(there)) {
    throw IoError(
        "the metrics file {} is a pipe or a device, where a table can't get new columns; name a file, or write "
        "lines of JSON (.jsonl)",
        path_);
  }
  open_report(path_, 0);  // throws if the file can't be written
  replace(options.first_step > 0 ? rows_before(options, {}) : "");
}

/// Reads the columns of the file into columns_, and adds `more`. Reads into last_ the last row that the new run does not write again.
/// Returns the text of all rows up to that row, with the new columns. Drops an incomplete last row, which an interrupted run has left. An
/// error changes nothing.
std::string CsvReporter::rows_before(const ReporterOptions& options, std::vector<std::string> more) {
  std::ifstream stream(path_, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  std::string_view rest = text;
  if (rest.empty()) {
    columns_ = std::move(more);
    return {};
  }
  const auto refuse = [&](const std::string& what) {
    throw IoError("{} of {}, so this run can't continue the file; name another file", what, path_);
  };
  const auto names = take_record(rest);
  if (!names || names->front() != kStep) refuse("'step' is not the first column");
  std::erase_if(more, [&](const std::string& name) { return std::ranges::find(*names, name) != names->end(); });
  std::vector<Row> rows;
  for (int64_t number = 1; !rest.empty(); number++) {
    const auto line = rest.substr(0, rest.find('\n'));
    const auto fields = take_record(rest);
    if (!fields && line.size() == rest.size()) break;
    const auto step = fields && fields->size() == names->size() ? leading_number(fields->front()) : std::nullopt;
    if (!step) refuse(fmt::format("row {} ('{}') is not a row of metrics", number, printable(line.substr(0, 40))));
    const auto has = [&](const std::string& name) {
      const auto column = std::ranges::find(*names, name) - names->begin();
      return column < std::ssize(*fields) && !(*fields)[static_cast<size_t>(column)].empty();
    };
    if (is_made_again(*step, options, has)) break;
    rows.push_back({.step = *step, .fields = {fields->begin() + 1, fields->end()}});
  }
  columns_.assign(names->begin() + 1, names->end());
  std::ranges::move(more, std::back_inserter(columns_));
  if (!rows.empty()) last_ = rows.back();
  std::string result;
  for (const auto& row : rows) result += text_of(row);
  return result;
}

std::string CsvReporter::text_of(const Row& row) const {
  auto line = std::to_string(row.step);
  for (size_t i = 0; i < columns_.size(); i++) line += ',' + (i < row.fields.size() ? field_text(row.fields[i]) : "");
  return line + '\n';
}

std::string CsvReporter::header() const {
  std::string line(kStep);
  for (const auto& name : columns_) line += ',' + field_text(name);
  return line + '\n';
}

/// Replaces the file with the header and these rows, the last of which is `last_`.
void CsvReporter::replace(const std::string& rows) {
  const auto text = header() + rows;
  write_text(path_, text);
  file_ = open_report(path_, 0);
  size_ = static_cast<off_t>(text.size());
  last_begin_ = size_ - (last_ ? static_cast<off_t>(text_of(*last_).size()) : 0);
}

void CsvReporter::add_columns(const Values& values) {
  auto columns = columns_;
  for (const auto& value : values) {
    if (std::ranges::find(columns, value.name) == columns.end()) columns.push_back(value.name);
  }
  if (columns.size() == columns_.size()) return;
  replace(rows_before({.first_step = std::numeric_limits<int64_t>::max()}, std::move(columns)));
}

void CsvReporter::write(int64_t step, const Values& values) {
  if (!file_) return;
  expect_names(path_, step, values);
  add_columns(values);
  if (!last_ || last_->step != step) {
    last_ = Row{.step = step, .fields = {}};
    last_begin_ = size_;
  }
  last_->fields.resize(columns_.size());
  for (const auto& [name, value, unit] : values) {
    const auto column = static_cast<size_t>(std::ranges::find(columns_, name) - columns_.begin());
    last_->fields[column] = number_text(value);
  }
  const auto line = text_of(*last_);
  write_report(file_, path_, step, line, last_begin_);
  size_ = last_begin_ + static_cast<off_t>(line.size());
  // A later value of the same name may be shorter, and a full disk may have left a part of a row.
  if (::ftruncate(file_.get(), size_) != 0) {
    throw IoError("can't shorten the metrics file {}: {}", path_, std::strerror(errno));
  }
}

}  // namespace tessera::train
