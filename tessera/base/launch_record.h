// What ranks tell the launcher that started them: that they wait for the others at the start, that they have read what the configuration
// says, and because of which rank they fail.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/base/memory_file.h"

namespace tessera {

// These do nothing if there is no launcher, or if the record can't be written.

/// `rank` joins a world, and waits until the other ranks join it too.
void record_start(int rank) noexcept;
/// The world that `rank` has waited for is there.
void record_joined(int rank) noexcept;
/// `rank` has read what the configuration says.
void record_settings(int rank) noexcept;
/// `rank` fails because of rank `culprit`.
void record_failure(int rank, int culprit) noexcept;
/// The same, if the launcher knows this process by the number `rank` and `culprit` is another one. A world of only some of its ranks, or of
/// threads, numbers them otherwise. All ranks may survive a failure `in_step`: nothing is wrong with their connections.
void record_failure_in_world(int rank, int culprit, bool in_step = false) noexcept;
/// `rank` has survived, if it has recorded a failure since the last call. Costs nothing otherwise.
void record_recovery(int rank) noexcept;

/// The launcher's side. A line is `RANK starts`, `RANK joined`, `RANK settings`, `RANK CULPRIT`, `RANK CULPRIT step` or
/// `RANK recovers`.
class LaunchRecord {
 public:
  /// The environment variable that holds path() for a rank.
  static constexpr const char* kVariable = "TESSERA_LAUNCH_RECORD";

  LaunchRecord();

  std::string path() const { return file_.path(); }

  struct Rank {
    int starts = 0, joined = 0;  // how many worlds
    bool read_settings = false;
    std::optional<int> culprit = {};  // the last that it named, unless it or, after a step, the named one has survived
    bool in_step = false;             // it named it in a step

    bool waits() const { return starts > joined; }
  };
  /// What each rank has told so far. Lines that make no sense are left out.
  std::map<int, Rank> read() const;

 private:
  MemoryFile file_;
};

}  // namespace tessera
