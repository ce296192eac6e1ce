#include "tessera/shard/unit/start_values.h"

#include <ATen/ATen.h>

#include <ranges>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/fingerprint.h"

namespace tessera {
namespace {

/// All values of a dense tensor in the order in which they lie in memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  // A parameter whose operators are replaced is paged even before it is sharded.
  if (is_paged(tensor)) return flat_view(tensor.storage(), tensor.scalar_type()).narrow(0, tensor.storage_offset(), tensor.numel());
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

}  // namespace

/// Computes the values of a parameter that lacks them, in new memory.
at::Tensor Starts::computed(const ManagedParameter& parameter) const {
  const auto& tensor = parameter.tensor;
  if (!options_.param_init_fn) return computed_values(tensor);
  const auto device = device_of_values(tensor, options_.mesh->world().traits().device);
  const auto values = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  initialise(options_.param_init_fn, parameter.name, values);
  return values;
}

bool Starts::can_make(const ManagedParameter& parameter) const {
  return !lacks_values(parameter.tensor) || options_.param_init_fn || has_recipe(parameter.tensor);
}

void Starts::expect_sendable(std::span<const std::vector<ManagedParameter>> groups) const {
  const auto& world = options_.mesh->world();
  if (options_.start != Start::FromRank0) return;
  std::vector<std::string> missing;
  for (const auto& parameter : groups | std::views::join) {
    if (world.is_first() && !can_make(parameter)) missing.push_back(parameter.name);
  }
  all_or_none(world, {.unit = unit_}, "can't send its parameters", [&] {
    if (missing.empty()) return;
    throw UsageError(
        "rank 0 is to send its parameters to the others, but has no values for {}; make or load the module there, or "
        "shard with {{.start = tessera::Start::Loaded}} and load afterwards",
        some_of(missing));
  });
}

/// Returns the values that this rank has or makes itself.
StartValues Starts::made(const ManagedParameter& parameter, const Span& span) const {
  const auto& tensor = parameter.tensor;
  const auto full = dense(parameter);
  StartValues result{.sizes = full.sizes().vec(), .strides = full.strides().vec()};
  if (!lacks_values(tensor)) {
    result.all = in_memory_order(full);
    return result;
  }
  // The values in a trace for simulated ranks do not matter.
  if (const auto& traits = options_.mesh->world().traits(); traits.simulated && traits.traces) {
    result.all = at::zeros({tensor.numel()}, tensor.options().device(traits.device));
    return result;
  }
  if (!can_make(parameter)) return result;
  const bool sends = options_.start == Start::FromRank0;
  const bool may_be_part = !sends && !options_.param_init_fn && !options_.mesh->world().traits().traces;
  if (may_be_part && tensor.strides() == full.strides() && has_parts(tensor)) {
    result.part = computed_values(tensor, {.begin = span.shard_begin, .numel = span.shard_numel});
    result.fingerprint = fingerprint_of_recipe(tensor);
    return result;
  }
  auto with_values = parameter;
  with_values.tensor = computed(parameter);
  result.all = in_memory_order(dense(with_values));
  return result;
}

StartValues Starts::of(const ManagedParameter& parameter, const Span& span) {
  const auto& world = options_.mesh->world();
  const auto& tensor = parameter.tensor;
  const bool sends = options_.start == Start::FromRank0;
  StartValues result;
  const bool is_loaded = options_.start == Start::Loaded && lacks_values(tensor);
  if (is_loaded || making_.failed() || (sends && !world.is_first())) {
    const auto full = dense(parameter);
    result = {.sizes = full.sizes().vec(), .strides = full.strides().vec()};
  } else {
    making_.attempt([&] { result = made(parameter, span); });
  }
  if (sends) {
    // Rank 0 broadcasts even if it has failed to make its values, because the other ranks wait for it here.
    const auto options = tensor.options().device(world.traits().device);
    result.all = result.known() ? result.all.to(options) : at::empty({tensor.numel()}, options);
    world.broadcast(result.all, 0, {.unit = unit_}).wait();
  }
  if (result.all.defined() && !world.traits().traces) result.fingerprint = fingerprint(result.all);
  return result;
}

}  // namespace tessera
