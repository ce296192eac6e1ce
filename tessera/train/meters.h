// Means over the samples of many batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/communicator.h"

namespace tessera::train {

/// add() does not wait for a device: the sum stays on the device until value() is called.
class Mean {
 public:
  /// Adds a batch: the mean over its samples, as loss functions return it, and the number of samples.
  void add(const at::Tensor& mean, int64_t samples);

  /// The mean over all samples; NaN if there were none.
  double value() const;
  /// The mean over the samples of all ranks. Collective: also ranks without samples call it.
  double value(const Communicator& world) const;

  int64_t samples() const { return samples_; }

 private:
  at::Tensor sum_;
  int64_t samples_ = 0;
};

/// The fraction of samples whose target has the largest score, as a tensor on the same device. Scores are {samples, classes}.
at::Tensor accuracy(const at::Tensor& scores, const at::Tensor& targets);

}  // namespace tessera::train
