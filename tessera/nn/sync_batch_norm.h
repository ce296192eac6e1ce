// Batch normalization over the batches of all ranks.
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"

namespace tessera::nn {

/// Normalizes with the mean and the variance over the batches of all ranks, which may differ in size and be empty. Gradients are those of
/// the sum of the losses of all ranks. Evaluation uses the running statistics, which are equal on all ranks. Parameters, buffers and
/// options are those of torch::nn::BatchNorm1d to 3d. All ranks must call it, and backward, in the same order.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<0, SyncBatchNormImpl> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Communicator world)
      : BatchNormImplBase(options), world_(std::move(world)) {}

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  Communicator world_;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every BatchNorm1d to 3d in the sharded module compute over the batches of all ranks, as a SyncBatchNorm does. The modules stay the
/// same objects, because members of other modules hold them. Throws UsageError, with the names, for batch norms without a sharded weight,
/// by which their calls are recognized.
void convert_sync_batchnorm(ModuleRef module, const Communicator& world);

}  // namespace tessera::nn
