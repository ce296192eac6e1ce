// Means over the samples of many batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/communicator.h"

namespace tessera::train {

/// Adding does not wait for a device: the sum stays there until it is asked for.
class Mean {
 public:
  /// The mean over a batch, as losses give it, and how many samples that was.
  void add(const at::Tensor& mean, int64_t samples);

  /// NaN if there was no sample.
  double value() const;
  /// Over the samples of all ranks; every rank asks at the same point, also one that had no sample.
  double value(const Communicator& world) const;

  int64_t samples() const { return samples_; }

 private:
  at::Tensor sum_;
  int64_t samples_ = 0;
};

/// The share of samples whose largest score is that of their target, as a tensor on the same device. Scores are {samples, classes}.
at::Tensor accuracy(const at::Tensor& scores, const at::Tensor& targets);

}  // namespace tessera::train
