// Parameters that are about to become part of a unit: the requirements that they must meet, and what happens to their former memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

struct ManagedParameter {
  std::string name;
  at::Tensor tensor;
  size_t index = 0;                           // a number of the caller's choice, passed on to Unit::Parameter
  std::vector<std::string> other_names = {};  // the further names of a tied parameter
  std::optional<int64_t> shard_dim = {};      // the dimension along which the parameter is divided, if not the outermost in memory
};

/// Throws UsageError, with the names of the parameters, if one of them can't be sharded or if two of them share memory.
void expect_shardable(std::span<const ManagedParameter> managed);

/// Returns the tensor itself if its values lie in memory without gaps and in the order that the unit needs, else a copy that meets these
/// conditions. The order of the dimensions in memory is kept, except that `shard_dim` becomes the outermost.
at::Tensor dense(const ManagedParameter& parameter);

/// The memory that managed parameters have before they become part of a unit. A tensor of the program that still refers to this memory
/// afterwards would never see new values, so any use of such a tensor becomes an error.
class FormerMemory {
 public:
  explicit FormerMemory(std::span<const ManagedParameter> managed);
  FormerMemory(const FormerMemory&) = delete;
  FormerMemory& operator=(const FormerMemory&) = delete;
  ~FormerMemory();  // guards former memory that other tensors still refer to

  /// To be called once the parameters have their new memory. Without this call, the destructor does not guard the memory of these
  /// parameters.
  void abandon() { abandoned_ = true; }

 private:
  struct Place;
  std::vector<Place> places_;
  bool abandoned_ = false;
};

}  // namespace tessera
