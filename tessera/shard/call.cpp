#include "tessera/shard/call.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/shard/activation/marks.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/boundary.h"
#include "tessera/shard/unit/forward_phase.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

/// Whether operators compute with what the shards hold of a part of the module, inside full_params.
bool shows_stored(const torch::nn::Module& module) {
  return UnitState::some_show_stored() && std::ranges::any_of(units(module), [](const auto& unit) { return unit->flags().shows_stored.load(); });
}

}  // namespace

ForwardCall::ForwardCall(const torch::nn::Module& module) {
  if (const auto boundary = boundary_of(module)) {
    unit_ = boundary->unit.lock();
    input_dtype_ = boundary->input_dtype;
    output_dtype_ = boundary->output_dtype;
  }
  if (input_dtype_ && shows_stored(module)) input_dtype_.reset();
  checkpointing_ = activation::mark_of(module);
  phase_ = std::make_unique<ForwardPhase>(module, unit_.get());
}

ForwardCall::~ForwardCall() = default;

void ForwardCall::cast_tensor(at::Tensor& tensor, at::ScalarType dtype) {
  if (at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype) tensor = tensor.to(dtype);
}

}  // namespace tessera
