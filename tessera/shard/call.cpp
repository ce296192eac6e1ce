#include "tessera/shard/call.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "tessera/shard/access/forward_phase.h"
#include "tessera/shard/activation/marks.h"
#include "tessera/shard/unit/boundary.h"
#include "tessera/shard/unit/stored_form.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

ForwardCall::ForwardCall(const torch::nn::Module& module) {
  if (const auto boundary = boundary_of(module)) {
    unit_ = boundary->unit.lock();
    input_dtype_ = boundary->input_dtype;
    output_dtype_ = boundary->output_dtype;
  }
  if (input_dtype_ && StoredForm::is_used(module)) input_dtype_.reset();
  checkpointing_ = activation::mark_of(module);
  phase_ = std::make_unique<ForwardPhase>(module, unit_.get());
}

ForwardCall::~ForwardCall() = default;

void ForwardCall::cast_tensor(at::Tensor& tensor, at::ScalarType dtype) {
  if (at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype) tensor = tensor.to(dtype);
}

}  // namespace tessera
