// Which rank made a job fail, by what ranks have recorded.
#pragma once

#include <map>
#include <optional>

#include "tessera/base/error_record.h"

namespace tessera::cli {

/// What is known of a rank of this host that has ended.
struct RankEnd {
  int status = 0;
  bool stopped = false;                   // by the launcher
  std::optional<int> culprit = {};        // the rank that it has named as the reason of its failure
  std::optional<ErrorRecord> error = {};  // its record
};

struct Blame {
  int rank = 0;
  std::optional<int> left_early = {};  // a rank that ended with status 0 while this one still needed it
  std::optional<int> elsewhere = {};   // a rank of another host because of which this one failed
  std::optional<int> still_ran = {};   // a rank because of which this one failed, and that the launcher had to stop
};

/// Goes from the rank that ended first to the one because of which it failed, which may end later and may itself have failed because of a
/// third one. `world_size` tells ranks of other hosts from numbers that make no sense.
Blame find_blame(int first, const std::map<int, RankEnd>& ranks, int world_size);

}  // namespace tessera::cli
