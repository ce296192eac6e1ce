// The folder in which launch keeps what each rank prints: attempt_0/rank_3/stdout.log, stderr.log and error.json.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/fd.h"

namespace tessera::cli {

/// Makes the folder of a rank. Throws IoError.
std::filesystem::path make_rank_folder(const std::filesystem::path& logs, int attempt, int rank);

/// A log file. A full disk does not stop the job: bytes that can't be written are dropped and counted.
class LogFile {
 public:
  LogFile() = default;  // writes nothing
  /// Throws IoError.
  explicit LogFile(std::filesystem::path path);

  void write(std::string_view bytes);
  /// Returns a message such as "logs/x/stdout.log lost 12 bytes: No space left on device"; nothing if no byte was lost.
  std::optional<std::string> trouble() const;

 private:
  std::filesystem::path path_;
  Fd file_;
  uint64_t lost_ = 0;  // how many bytes were lost
  int reason_ = 0;     // errno of the first loss
};

}  // namespace tessera::cli
