// A record of which rank failed because of which other rank: written by the ranks, read by the launcher that started them.
#pragma once

#include <optional>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

/// Tells the launcher that `rank` fails because of rank `culprit`. Does nothing if there is no launcher or the record can't be written.
void record_failure(int rank, int culprit) noexcept;

/// The launcher's side: a memory file (memfd) with lines `RANK CULPRIT`, which disappears with the launcher. Ranks open it by its path, so
/// it also works under wrappers that close inherited descriptors.
class FailureRecord {
 public:
  /// The environment variable that holds path() for a rank.
  static constexpr const char* kVariable = "TESSERA_FAILURE_FILE";

  FailureRecord();

  std::string path() const;
  /// The culprit in the last line that this rank wrote; nothing if it wrote none.
  std::optional<int> culprit_of(int rank) const;

 private:
  Fd file_;
};

}  // namespace tessera
