#include "tessera/cli/launch/blame.h"

#include <set>

namespace tessera::cli {
namespace {

/// Where to begin: a rank that recorded its error earlier failed earlier, though it took longer to end.
int first_to_fail(int first, const std::map<int, RankEnd>& ranks) {
  for (const auto& [rank, end] : ranks) {
    const auto &own = end.error, &others = ranks.at(first).error;
    if (end.status != 0 && own && others && own->when < others->when) first = rank;
  }
  return first;
}

}  // namespace

Blame find_blame(int first, const std::map<int, RankEnd>& ranks, int world_size) {
  Blame blame;
  std::set<int> seen;
  for (int rank = first_to_fail(first, ranks); seen.insert(rank).second;) {
    blame.rank = rank;
    const int culprit = ranks.at(rank).culprit.value_or(rank);
    const auto found = ranks.find(culprit);
    if (found == ranks.end()) {
      if (culprit >= 0 && culprit < world_size) blame.elsewhere = culprit;
      break;
    }
    // A rank that was stopped failed by itself only if it said so before.
    if (found->second.stopped && !found->second.error) {
      if (culprit != rank) blame.still_ran = culprit;
      break;
    }
    if (culprit != rank && found->second.status == 0) {
      blame.left_early = culprit;
      break;
    }
    rank = culprit;
  }
  return blame;
}

}  // namespace tessera::cli
