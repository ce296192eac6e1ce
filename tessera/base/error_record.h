// Why a rank failed, as a record in a file that its launcher reads: the error file of torchrun.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The variable with the path of the file. Empty or unset: nothing is recorded.
inline constexpr const char* kErrorFile = "TORCHELASTIC_ERROR_FILE";

/// Writes why this process fails into the file that its launcher has named. Keeps the first record, because later failures are its
/// consequences. Does nothing without such a file, or if it can't be written.
void record_error(std::string_view message) noexcept;

struct ErrorRecord {
  std::string message;
  std::chrono::system_clock::time_point when;  // when the record was written
};

/// Reads the record that Tessera or Python's torch has written, or plain text. Nothing if the file is empty or missing.
std::optional<ErrorRecord> read_error_record(const std::filesystem::path& file);

}  // namespace tessera
