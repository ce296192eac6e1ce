// Which rank made which other rank fail: the ranks write it down for the launcher that started them.
#pragma once

#include <optional>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

/// Tells the launcher, if it keeps a record, that `rank` fails because of rank `culprit`. Never throws: a line that can't be written is
/// left out.
void record_failure(int rank, int culprit) noexcept;

/// The launcher's side of the record: a memory file, so that nothing is left behind. Ranks reach it by its path, also through wrappers that
/// close inherited descriptors; each line is `RANK CULPRIT`.
class FailureRecord {
 public:
  /// The environment variable in which a rank finds path().
  static constexpr const char* kVariable = "TESSERA_FAILURE_FILE";

  FailureRecord();

  std::string path() const;
  /// The culprit that this rank named last.
  std::optional<int> culprit_of(int rank) const;

 private:
  Fd file_;
};

}  // namespace tessera
