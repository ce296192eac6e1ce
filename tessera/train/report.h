// Functions that the reporters of all formats share: they check reports, and write them into files.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Throws UsageError if two values of a report have the same name, or a name is not allowed.
void expect_names(const std::filesystem::path& path, int64_t step, const Values& values);

/// Whether this run writes a report of an earlier run again, so that the earlier report is dropped. `has` tells whether the report has a
/// value of this name.
bool is_made_again(int64_t step, const ReporterOptions& options, c10::function_ref<bool(const std::string& name)> has);

/// Makes the folders above a file. Throws IoError.
void make_folders_for(const std::filesystem::path& file);

/// Opens or creates a file for writing, with these flags of open(2). Throws IoError.
Fd open_report(const std::filesystem::path& path, int flags);

/// Writes the text at the current position of the file. Throws IoError.
void write_report(const Fd& file, const std::filesystem::path& path, int64_t step, std::string_view text);

/// Returns the shortest text that gives a number back: also "nan", "inf" and "-inf". A number that a float can hold gets the digits of a float: 0.1, not
/// 0.10000000149011612.
std::string shortest_text(double number);

/// Returns the number at the beginning of a text; other text may follow the number. Nothing if there is no number.
std::optional<int64_t> leading_number(std::string_view text);

}  // namespace tessera::train
