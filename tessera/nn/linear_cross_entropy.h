// The cross entropy of a linear layer's scores, without all scores in memory at once: the scores of a large vocabulary take much memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::nn {

struct LinearCrossEntropy {
  int64_t ignore_index = -100;  // the target of rows that do not count
  double softcap = 0;           // scores become softcap * tanh(scores / softcap); 0: they stay
  double z_loss = 0;            // the weight of the mean square of log(sum(exp(scores))), which keeps scores from drifting away
  int64_t rows_at_once = 0;     // 0: as many rows as take 32 MB, or an eighth of the weight's gradient if that is more
  at::Tensor divisor = {};      // divides the sum of losses, in place of the number of rows that count
};

/// cap * tanh(scores / cap); the scores themselves if cap is 0.
at::Tensor softcapped(const at::Tensor& scores, double cap);

/// The mean of cross_entropy(x @ weight.T, targets) over the rows that count; 0 if no row does. x: {..., inputs}, weight: {classes,
/// inputs}, targets: integers {...}. Losses are computed in float32, whatever the dtype of x and weight. Gradients are made in forward,
/// chunk by chunk of rows, so that backward reads neither x nor weight; scores take the memory of one chunk. Second derivatives are
/// refused.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropy& options = {});

/// The cross entropy of each row, {...}; 0 for rows that do not count. `divisor` plays no part. As only backward tells how much each row
/// counts, scores are computed again there, chunk by chunk.
at::Tensor linear_cross_entropies(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                  const LinearCrossEntropy& options = {});

}  // namespace tessera::nn
