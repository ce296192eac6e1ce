// Functions that the reporters of all formats share: they check reports, and write them into files.
#pragma once

#include <sys/types.h>

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Throws UsageError if a report may not be written: each value has a name of its own.
void expect_names(const std::filesystem::path& path, int64_t step, const Values& values);

/// Whether this run makes a report of an earlier run again. `has` tells whether that report has a value of this name.
bool is_made_again(int64_t step, const ReporterOptions& options, c10::function_ref<bool(const std::string& name)> has);

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
