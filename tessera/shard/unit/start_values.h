// The values with which the parameters of a unit start: their own values, values that deferred_init has recorded or param_init_fn makes, or
// rank 0's values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/options.h"
#include "tessera/shard/unit/layout.h"
#include "tessera/shard/unit/managed_parameter.h"

namespace tessera {

/// The start values of one parameter.
struct StartValues {
  std::vector<int64_t> sizes, strides;  // the sizes and strides of the parameter in the unit
  at::Tensor all = {};       // all values, flat in memory order; undefined if no rank needs all values, or the parameter has none
  at::Tensor part = {};      // the values in this rank's span, if `all` is undefined; undefined if the parameter has none
  uint64_t fingerprint = 0;  // the same on all ranks if their values agree

  bool known() const { return all.defined() || part.defined(); }
};

/// Gets the values of a unit's parameters, one after the other. The parameters stay unchanged.
class Starts {
 public:
  /// `options` must outlive this object.
  Starts(const ShardOptions& options, std::string unit) : options_(options), unit_(std::move(unit)) {}

  /// Throws UsageError on all ranks if rank 0 is to send parameters for which it has no values; the error names them. Collective with
  /// Start::FromRank0.
  void expect_sendable(std::span<const std::vector<ManagedParameter>> groups) const;
  /// Returns the start values of one parameter, so that the values of only one parameter are in memory at a time. If making them fails,
  /// expect_all() throws the error. Collective with Start::FromRank0.
  StartValues of(const ManagedParameter& parameter, const Span& span);
  /// Throws on all ranks if some rank could not make its values. Collective.
  void expect_all() const { making_.expect_all(options_.mesh->world(), {.unit = unit_}, "can't make its parameters"); }

 private:
  bool can_make(const ManagedParameter& parameter) const;
  at::Tensor computed(const ManagedParameter& parameter) const;
  StartValues made(const ManagedParameter& parameter, const Span& span) const;

  const ShardOptions& options_;
  const std::string unit_;
  AllOrNone making_;
};

}  // namespace tessera
