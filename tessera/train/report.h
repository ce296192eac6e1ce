// What the reporters of all formats have in common: which reports they take, and how these get into a file.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"
#include "tessera/train/value.h"

namespace tessera::train {

/// The rules of reports: steps ascend, and each value has a name of its own.
class ReportRules {
 public:
  ReportRules(std::filesystem::path path, int64_t first_step);

  /// Throws UsageError if it may not be written.
  void check(int64_t step, const Values& values);

 private:
  std::filesystem::path path_;
  int64_t step_;
};

/// Makes the folders above a file. Throws IoError.
void make_folders_for(const std::filesystem::path& file);

/// Opens a file for writing, with these flags. Throws IoError.
Fd open_report(const std::filesystem::path& path, int flags);

/// Writes the text where the file stands, or at `offset`. Throws IoError.
void write_report(const Fd& file, const std::filesystem::path& path, int64_t step, std::string_view text,
                  std::optional<off_t> offset = std::nullopt);

/// The shortest text of a finite number. One that is a float has the precision of a float: 0.1, not 0.10000000149011612.
std::string shortest_text(double number);

/// The number at the beginning of a text; nothing if there is none.
std::optional<int64_t> leading_number(std::string_view text);

}  // namespace tessera::train
