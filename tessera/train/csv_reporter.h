// CsvReporter: writes reports to a table of comma-separated values, with a row for each step and a column for each name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/fd.h"
#include "tessera/train/report.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Texts are quoted as RFC 4180 says, and lines end in \n. Several reports of a step share its row; a field without a value is empty; numbers
/// are exact, "nan", "inf" or "-inf". A report with a new name replaces the file by one that has a column for the name.
class CsvReporter : public Reporter {
 public:
  explicit CsvReporter(std::filesystem::path path, const ReporterOptions& options = {});
  void write(int64_t step, const Values& values) override;

 private:
  struct Row {
    int64_t step;
    std::vector<std::string> fields;  // without the step; columns at the end may be missing
  };
  std::string text_of(const Row& row) const;
  std::string header() const;
  std::string rows_before(const ReporterOptions& options, std::vector<std::string> more);
  void replace(const std::string& rows);
  void add_columns(const Values& values);

  std::filesystem::path path_;
  Fd file_;  // open only on rank 0
  std::vector<std::string> columns_;
  std::optional<Row> last_;
  off_t last_begin_ = 0, size_ = 0;  // where the last row begins, and the size of the file
};

}  // namespace tessera::train
