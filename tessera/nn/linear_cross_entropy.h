// The cross entropy of a linear layer's scores, without all scores in memory at once: those of a large vocabulary take much.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

struct LinearCrossEntropy {
  int64_t ignore_index = -100;  // the target of rows that do not count
  double z_loss = 0;            // this times the mean square of log(sum(exp(scores))) is added, which keeps scores from drifting away
  int64_t rows_at_once = 0;     // 0: as many as take 32 MB, or an eighth of the weight's gradient if that is more
  at::Tensor divisor = {};      // a number by which the sum is divided, in place of how many rows count
};

/// The mean of cross_entropy(x @ weight.T, targets) over the rows that count; 0 if none does. x: {..., inputs}, weight: {classes, inputs},
/// targets: integers {...}. Losses are computed in float32, whatever the dtype of x and weight. Gradients are made in forward, chunk by
/// chunk of rows, so that backward reads neither x nor weight; scores take the memory of one chunk. Second derivatives are refused.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropy& options = {});

}  // namespace tessera::nn
