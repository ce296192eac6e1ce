// Meters: means over many batches, and accuracy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>

#include "tessera/comm/communicator.h"

namespace tessera::train {

/// The mean over the samples of many batches. add() does not wait for a device: the sum stays there until value() is called.
class Mean {
 public:
  /// Adds a batch, given as the mean over its samples, which loss functions return, and the number of samples.
  void add(const at::Tensor& mean, int64_t samples);

  /// The mean over all samples; NaN if there were none.
  double value() const;
  /// The mean over the samples of all ranks. Collective: ranks without samples call it, too.
  double value(const Communicator& world) const;

  int64_t samples() const { return samples_; }

 private:
  at::Tensor sum_;
  int64_t samples_ = 0;
};

/// The mean of the last values that were added: shows the trend of a loss without the jitter of single batches.
class RunningMean {
 public:
  explicit RunningMean(int64_t values = 20);

  /// Adds a value and returns the mean, which is not finite as long as one of the last values is not.
  double add(double value);

 private:
  size_t most_;
  std::deque<double> values_;
};

/// The fraction of samples whose target has the largest score, as a tensor on the same device. Scores are {samples, classes}.
at::Tensor accuracy(const at::Tensor& scores, const at::Tensor& targets);

}  // namespace tessera::train
