// Why a rank failed, as a record in a file that its launcher reads: the error file of torchrun.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The variable with the path of the file. Empty or unset: nobody wants to know.
inline constexpr const char* kErrorFile = "TORCHELASTIC_ERROR_FILE";

/// Writes why this process fails into the file that its launcher has named. The first record counts: later ones are consequences. Does
/// nothing without such a file, or if it can't be written.
void record_error(std::string_view message) noexcept;

struct ErrorRecord {
  std::string message;
  std::chrono::system_clock::time_point when;  // it was written
};

/// What is written there, by a process of Tessera, by one of Python's torch, or as plain text. Nothing if nobody has written.
std::optional<ErrorRecord> read_error_record(const std::filesystem::path& file);

}  // namespace tessera
