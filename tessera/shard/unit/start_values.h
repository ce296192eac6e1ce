// The values with which the parameters of a unit start: those that they have, or that were recorded, initialised or sent by rank 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/shard/options.h"
#include "tessera/shard/unit/candidate.h"
#include "tessera/shard/unit/layout.h"

namespace tessera {

/// Throws on all ranks if rank 0 is to send values that it does not have. Collective then.
void expect_start(const std::vector<Candidate>& candidates, const ShardOptions& options, const std::string& unit);

/// Of one parameter.
struct StartValues {
  std::vector<int64_t> sizes, strides;  // as the unit has it
  at::Tensor all = {};                  // flat, in the order of memory; undefined if nobody needs to have all, or nobody has any
  at::Tensor part = {};                 // those in this rank's span, if `all` is undefined; undefined if nobody has any
  uint64_t fingerprint = 0;             // the same on all ranks if they agree

  bool known() const { return all.defined() || part.defined(); }
};

/// Makes room for the values of this parameter only. Collective with Start::FromRank0.
StartValues start_values(const Candidate& candidate, const Span& span, const ShardOptions& options, const std::string& unit);

/// The parameters of a unit as they have arrived.
struct Arrivals {
  std::vector<std::string> names = {};
  std::vector<uint64_t> fingerprints = {};
};

/// With Start::FromRank0, throws on all ranks, with the names of the parameter and the rank, if values are not those that rank 0 has sent.
/// Collective then.
void expect_arrived(const Arrivals& arrivals, const ShardOptions& options, const std::string& unit);

}  // namespace tessera
