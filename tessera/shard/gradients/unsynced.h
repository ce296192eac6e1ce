// The gradients of a unit that no reduction has included yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <span>
#include <utility>

#include "tessera/shard/unit/unit.h"

namespace tessera {

class UnsyncedGradients {
 public:
  bool empty() const { return sums_.empty() && parts_.empty(); }
  /// All ranks call it after passes that reduce nothing, also those that have used no parameter of the unit in them.
  void expect() { expected_ = true; }
  /// Whether any rank may have unsynced gradients.
  bool may_exist() const { return expected_ || !empty(); }
  void clear() {
    expected_ = dropped_ = false;
    sums_.clear();
    parts_.clear();
    in_parts_.clear();
  }

  /// A copy of the sum of a parameter's gradients on this rank; undefined if there is none. Throws UsageError if its sums over the shard
  /// group wait for the all-reduce.
  at::Tensor sum_of(const Unit::Parameter& parameter) const;

  /// Drops the unsynced gradient of a parameter in the group of this number.
  void drop(const Unit::Parameter& parameter, size_t group);
  /// Whether anything was dropped since the last call. All ranks have to drop, or none.
  bool forget_drops() { return std::exchange(dropped_, false); }

  /// Adds gradients of whole parameters on this rank, in at least float32.
  void add(std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients);
  /// Adds the sums to gradients that are about to be reduced, and forgets the sums. Throws UsageError if one belongs to a parameter that
  /// has been frozen since. Parameters whose sums over this rank's shard group wait for the all-reduce get a gradient of zeros if they have
  /// none.
  void add_to(std::span<const Unit::Parameter* const> parameters, std::span<at::Tensor> gradients);

  /// Keeps a sum over this rank's shard group that was not all-reduced over the replicas.
  void add_part(size_t group, const at::Tensor& sum, const std::set<const Unit::Parameter*>& parameters);
  /// Adds the kept sums of a group to another one, and forgets them.
  void add_part_to(size_t group, const at::Tensor& sum);

 private:
  bool expected_ = false;  // since the last reduction
  bool dropped_ = false;
  std::map<const Unit::Parameter*, at::Tensor> sums_;
  std::map<size_t, at::Tensor> parts_;         // by the number of the group
  std::set<const Unit::Parameter*> in_parts_;  // that have a gradient in `parts_`
};

/// A gradient of zeros for a parameter, which takes no memory.
at::Tensor zeros_like(const Unit::Parameter& parameter, c10::Device device);

}  // namespace tessera
