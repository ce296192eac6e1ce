// Notices that all ranks of a model learn from the same batches, as they do under a sampler that does not know ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>

#include "tessera/comm/communicator.h"

namespace tessera {

class Unit;

/// Equal batches give equal gradients, and then a rank's own gradients are their mean over all ranks. Rank 0 compares a few values of the
/// two, without any exchange, until they differ for the first time. It warns once if they are equal in many passes in a row.
class EqualBatches {
 public:
  /// `world`: the ranks of the model.
  explicit EqualBatches(Communicator world) : world_(std::move(world)) {}

  /// Takes this rank's gradients in a unit's buffer before the mean is taken; `count` values from `begin` on belong to its own shards.
  void note_own(const Unit& unit, const at::Tensor& gradients, int64_t begin, int64_t count) {
    if (is_open_) keep(unit, gradients.narrow(0, begin, count));
  }
  /// To be called when a unit leaves the model, because units are known by address.
  void forget(const Unit& unit) { seen_.erase(&unit); }
  /// Takes the mean over all ranks of those values.
  void note_mean(const Unit& unit, const at::Tensor& mean) {
    if (is_open_) compare(unit, mean);
  }

 private:
  struct Seen {
    at::Tensor own = {};  // a few values
    int times = 0;        // passes in a row in which the mean was equal
  };

  void keep(const Unit& unit, const at::Tensor& gradients);
  void compare(const Unit& unit, const at::Tensor& mean);
  void close();

  const Communicator world_;
  bool is_open_ = true;  // whether there is anything left to find out
  std::map<const Unit*, Seen> seen_;
};

}  // namespace tessera
