// Reports of ranks to the launcher that started them: that they wait for the other ranks at the start, that they have read the
// configuration, and which rank made them fail.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/base/memory_file.h"

namespace tessera {

// The functions record_... do nothing without a launcher, or if the record can't be written.

/// Records that `rank` begins to wait for the other ranks of a world that it joins.
void record_start(int rank) noexcept;
/// Records that the world which `rank` has waited for is complete.
void record_joined(int rank) noexcept;
/// Records that `rank` has read a configuration, and with it the settings that the launcher passes on.
void record_settings(int rank) noexcept;
/// Records that `rank` fails because of rank `culprit`.
void record_failure(int rank, int culprit) noexcept;
/// Like record_failure(), but does nothing unless the launcher knows this process by the number `rank` and `culprit` is another rank: a
/// world of threads, or of only some ranks, numbers its ranks by itself. `in_step` means that connections are intact, so all ranks may
/// survive the failure.
void record_failure_in_world(int rank, int culprit, bool in_step = false) noexcept;
/// Records that `rank` has survived the failure that it recorded last. Does nothing, at no cost, if it has recorded none since the last
/// call.
void record_recovery(int rank) noexcept;

/// The launcher's side of the record, whose lines are `RANK starts`, `RANK joined`, `RANK settings`, `RANK CULPRIT`, `RANK CULPRIT step` or
/// `RANK recovers`.
class LaunchRecord {
 public:
  /// The environment variable that holds path() for a rank.
  static constexpr const char* kVariable = "TESSERA_LAUNCH_RECORD";

  LaunchRecord();

  std::string path() const { return file_.path(); }

  struct Rank {
    int starts = 0, joined = 0;  // how many worlds it has waited for, and how many of them are complete
    bool read_settings = false;
    std::optional<int> culprit = {};  // the rank that it named last; unset once it has survived, or if in_step, once the culprit has
    bool in_step = false;             // whether it named the culprit in a step

    bool waits() const { return starts > joined; }
  };
  /// Returns the records of each rank so far. Skips lines that make no sense.
  std::map<int, Rank> read() const;

 private:
  MemoryFile file_;
};

}  // namespace tessera
