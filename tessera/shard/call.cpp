#include "tessera/shard/call.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/some_ranks.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

/// Whether a unit of the module shows the stored form of its parameters (Access::ReadStored), with which operators then compute.
bool shows_stored(const torch::nn::Module& module) {
  return UnitState::some_show_stored() && std::ranges::any_of(units(module), [](const auto& unit) { return unit->flags().shows_stored.load(); });
}

/// Whether a parameter of the module has a gradient of an earlier pass that this pass reduces.
bool holds_unsynced(const torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(), [](const at::Tensor& parameter) {
    const auto found = locate(parameter);
    if (found.parameter == nullptr) return false;
    const LockedState state(*found.unit);
    return state->settings.syncs() && state->reduction.unsynced.has(*found.parameter);
  });
}

}  // namespace

at::Tensor rows_on_all_ranks(const torch::nn::Module& modules, const at::Tensor& own) {
  const auto all = units(modules);
  if (all.empty()) return own;
  const auto& world = all.front()->mesh().world();
  if (world.traits().simulated) return at::ones_like(own);
  const bool trains = c10::GradMode::is_enabled();
  const bool is_shared = std::ranges::all_of(all, [](const auto& unit) { return unit->memory().residence == "node-shared"; });
  if (is_shared) {  // the first use of a unit is collective, and later ones may not be
    for (const auto& unit : all) LockedState(*unit)->make_readable();
  }
  if (!world.traits().can_differ() || (!trains && is_shared && world.topology().hosts() == 1)) return own;
  const c10::AutoGradMode no_grad(false);
  auto sum = own.clone();
  const auto children = modules.children();
  for (size_t i = 0; trains && i < children.size(); i++) {
    if (holds_unsynced(*children[i])) sum[static_cast<int64_t>(i)] += 1;
  }
  world.all_reduce(sum, {}, {.unit = "rows_on_all_ranks"}).wait();
  return sum;
}

ForwardCall::ForwardCall(const torch::nn::Module& module) : ForwardCall(module, boundary_of(module)) {}

ForwardCall::ForwardCall(const torch::nn::Module& module, const Boundary& boundary)
    : unit_(boundary.unit.lock()),
      phase_(module, unit_.get()),
      checkpointing_(boundary.checkpointing),
      input_dtype_(boundary.input_dtype && !shows_stored(module) ? boundary.input_dtype : std::nullopt),
      output_dtype_(boundary.output_dtype) {}

ForwardCall::~ForwardCall() = default;

void ForwardCall::cast_tensor(at::Tensor& tensor, at::ScalarType dtype) {
  if (at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype) tensor = tensor.to(dtype);
}

namespace detail {

std::shared_ptr<torch::nn::Module> owner_of(torch::nn::Module* module) {
  if (module == nullptr) throw UsageError("tessera::call was given no module (null); as<M>() returns null if the module is of another class");
  auto owner = module->weak_from_this().lock();
  if (!owner) throw UsageError("tessera::call was given the address of a module that no shared_ptr owns; create it with std::make_shared");
  return owner;
}

at::Tensor forward_each(torch::nn::SequentialImpl& sequential, at::Tensor x) {
  if (sequential.is_empty()) return sequential.forward(std::move(x));  // throws an error of libtorch
  torch::nn::AnyValue value(std::move(x));
  for (auto& each : sequential) {
    const auto module = each.ptr();
    auto* const tensor = value.try_get<at::Tensor>();
    const auto boundary = boundary_of(*module);
    if (tensor == nullptr || !(boundary.is_sharded || boundary.checkpointing)) {
      value = each.any_forward(std::move(value));
      continue;
    }
    const auto forward = [each](torch::nn::Module&, at::Tensor input) {
      auto own = each;  // a call of an AnyModule changes the AnyModule
      return own.forward(std::move(input));
    };
    value = torch::nn::AnyValue(call_with(module, forward, std::move(*tensor)));
  }
  return value.get<at::Tensor>();
}

}  // namespace detail
}  // namespace tessera
