#include "tessera/shard/unit/unit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {

/// With a codec, returns the dtype that operators compute with for float32 shards, or nothing if that is float32 as well.
std::optional<at::ScalarType> compute_dtype_of(const ShardOptions& options) {
  if (!options.codec) return options.mixed_precision.param_dtype;
  const auto computed = options.codec->computed(at::kFloat);
  return computed == at::kFloat ? std::nullopt : std::optional(computed);
}

Unit::Unit(std::string name, uint64_t number, const ShardOptions& options, UnitLayout layout, CodecPtr codec, UnitMemory memory,
           c10::Device device)
    : name_(std::move(name)),
      options_(options),
      layout_(layout),
      codec_(std::move(codec)),
      compute_dtype_(compute_dtype_of(options)),
      device_(device),
      number_(number),
      memory_(std::move(memory)) {}

Buffers Unit::buffers() const {
  Buffers result;
  for (const auto& group : groups_) {
    if (auto unsharded = group.unsharded.lock()) {
      result.push_back({.number = group.number, .unsharded = std::move(unsharded), .own = group.own, .codec = codec_.get()});
    }
  }
  return result;
}

TaggedStoragePtr Unit::make_storage(Role role, size_t group, int64_t numel, at::ScalarType dtype) {
  StorageTag tag{.role = role, .unit = weak_from_this(), .group = group, .owner = role == Role::Unsharded ? shared_from_this() : nullptr};
  const auto device = role == Role::Unsharded || !is_offloaded() ? device_ : c10::Device(at::kCPU);
  return c10::make_intrusive<TaggedStorage>(std::move(tag), static_cast<size_t>(numel) * c10::elementSize(dtype), device);
}

void Unit::make_chunk_private(size_t group) {
  auto& own = groups_[group].own;
  auto& storage = groups_[group].own_storage();
  auto memory = allocate_memory(storage.nbytes(), storage.device(), name_);
  const auto before = std::exchange(own, {});
  storage.attach(std::move(memory));
  own = storage.memory_view(groups_[group].dtype).copy_(before);
}

Unit::Parameters Unit::parameters_in(const at::Tensor& view) const {
  const auto& group = groups_[tag_of(view)->group];
  if (!group.flat && view.numel() == 0) return {around(view)};
  // A view of the whole chunk also has the parameters that are empty here and have values on other ranks.
  const bool is_all = group.flat && view.numel() == group.chunk;
  auto last = view.storage_offset() + (view.numel() == 0 ? 0 : 1);
  for (int64_t i = 0; i < view.dim(); i++) last += (view.size(i) - 1) * view.stride(i);
  // A view may have another dtype than the shards, such as a view of bytes.
  const auto own = static_cast<int64_t>(c10::elementSize(group.dtype)), bytes = static_cast<int64_t>(view.itemsize());
  const auto begin = view.storage_offset() * bytes / own, end = (last * bytes + own - 1) / own;
  const auto lies_before = [&](const Parameter& parameter) {
    return !is_all && parameter.span.shard_offset + parameter.span.shard_numel <= begin;
  };
  Parameters result;
  auto each = std::ranges::partition_point(group.parameters, lies_before);
  for (; each != group.parameters.end() && (is_all || each->span.shard_offset < end); ++each) {
    if (is_all || each->span.shard_numel > 0) result.push_back(&*each);
  }
  return result;
}

void Unit::outdate(const at::Tensor& written) {
  const auto outdate_one = [](const Parameter& parameter) {
    if (const auto unsharded = parameter.unsharded.lock(); unsharded.defined()) unsharded.unsafeGetTensorImpl()->bump_version();
  };
  if (!written.defined()) {
    std::ranges::for_each(parameters_of(*this), outdate_one);
  } else if (const auto& group = groups_[tag_of(written)->group]; group.flat) {
    std::ranges::for_each(group.parameters, outdate_one);  // also parameters whose values are on other ranks, which write them
  } else {
    for (const auto* parameter : parameters_in(written)) outdate_one(*parameter);
  }
}

const Unit::Parameter* Unit::find(const at::Tensor& tensor) const {
  const auto known = parameters_.find(tensor.unsafeGetTensorImpl());
  if (known == parameters_.end()) return nullptr;
  const auto& parameter = *known->second;
  // A new tensor may have the address of an unsharded parameter that no longer exists.
  return parameter.shard.is_same(tensor) || parameter.unsharded.lock().is_same(tensor) ? &parameter : nullptr;
}

const Unit::Parameter* Unit::around(const at::Tensor& view) const {
  const auto& tag = *tag_of(view);
  const auto& parameters = groups_[tag.group].parameters;
  if (view.numel() == 0 && view.dim() > 0 && tag.role != Role::Unsharded) {
    return &parameters[std::clamp<size_t>(static_cast<size_t>(view.stride(0)), 1, parameters.size()) - 1];
  }
  const auto ends_before = [&](const Parameter& parameter) {
    const auto& span = parameter.span;
    const auto end = tag.role == Role::Unsharded ? span.offset + span.numel : span.shard_offset + span.shard_numel;
    return end <= view.storage_offset();
  };
  const auto found = std::ranges::partition_point(parameters, ends_before);
  return found == parameters.end() ? &parameters.back() : &*found;
}

Located locate(const at::Tensor& tensor) {
  if (!is_paged(tensor)) return {};
  auto unit = unit_of(tensor);
  if (!unit) return {};
  const auto* const parameter = unit->find(tensor);
  if (parameter == nullptr) return {};
  const auto& group = unit->groups()[tag_of(tensor)->group];
  return {std::move(unit), &group, parameter};
}

void note_values(const Unit& unit, const Unit::Parameter& parameter) {
  if (std::exchange(parameter.unset, false)) unit.flags().unset--;
}

void note_values(const Unit& unit, const at::Tensor& shard) {
  for (const auto* parameter : unit.parameters_in(shard)) note_values(unit, *parameter);
}

void expect_values(const Unit& unit, std::string_view what) {
  if (unit.flags().unset == 0) return;
  std::vector<std::string> names;
  for (const auto& parameter : parameters_of(unit)) {
    if (parameter.unset) names.push_back(parameter.name);
  }
  throw UsageError(
      "{} needs the values of {}, but nobody has loaded or initialised them: load_weights, checkpoint::load and "
      "load_full_state_dict load parameters, ShardOptions::param_init_fn initialises those of a module on the meta device, and "
      "deferred_init records how a module makes its own",
      what, some_of(names));
}

void expect_values_of(const Unit& unit, const at::Tensor& shard, std::string_view what) {
  const auto parameters = unit.parameters_in(shard);
  if (std::ranges::any_of(parameters, [](const Unit::Parameter* parameter) { return parameter->unset; })) expect_values(unit, what);
}

std::string name_of(const Unit::Parameter& parameter, const Unit& unit) {
  return fmt::format("'{}' of unit '{}'", parameter.name, unit.name());
}

}  // namespace tessera
