#include "tessera/shard/unit/unit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit_node.h"

namespace tessera {
namespace {

constexpr int64_t kAlignment = 64;  // bytes: what libtorch's allocator gives every tensor

/// All values of a dense tensor in the order in which they lie in memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

/// As many dimensions as the parameter, so that `dim() >= 2` still tells matrices from biases.
std::vector<int64_t> shard_sizes(int64_t numel, int64_t dim) {
  std::vector<int64_t> sizes(static_cast<size_t>(std::max<int64_t>(dim, 1)), 1);
  sizes.front() = numel;
  return sizes;
}

/// Gradients come in the dtype of the whole parameters, and sums are at least float32: nothing else can be asked for.
void expect_reducible(at::ScalarType whole, const MixedPrecision& precision) {
  if (!precision.reduce_dtype || !at::isFloatingType(whole)) return;
  const auto wanted = *precision.reduce_dtype;
  if (wanted == whole || c10::elementSize(wanted) < c10::elementSize(whole) || wanted == at::promoteTypes(whole, at::kFloat)) return;
  throw UsageError(fmt::format("gradients of {} can't be reduced in {}; leave reduce_dtype unset to add them in {}", c10::toString(whole),
                               c10::toString(wanted), c10::toString(at::promoteTypes(whole, at::kFloat))));
}

std::string freed_message(const std::string& unit) {
  return fmt::format(
      "the parameters of unit '{}' are sharded and not in memory now; operators bring them in by themselves, "
      "raw pointers need tessera::full_params(module)",
      unit);
}

}  // namespace

Unit::Unit(std::string name, const ShardOptions& options)
    : name_(std::move(name)), options_(options), number_(options.mesh.world().next_number()) {}

std::shared_ptr<Unit> Unit::make(std::string name, std::vector<Candidate> candidates, const ShardOptions& options,
                                 std::shared_ptr<Schedule> schedule) {
  expect_shardable(candidates);
  const std::shared_ptr<Unit> unit(new Unit(std::move(name), options));
  for (const auto& candidate : candidates) expect_reducible(unit->unsharded_dtype(candidate.tensor.scalar_type()), options.mixed_precision);
  unit->schedule_ = std::move(schedule);
  unit->memory_ = make_unit_memory(options, candidates.front().tensor.device());
  FormerMemory former(candidates);
  // Ordered by dtype and then by whether they are frozen, so that buffers of one dtype travel together.
  std::map<std::pair<at::ScalarType, bool>, std::vector<Candidate>> kinds;
  for (auto& candidate : candidates) {
    const auto kind = std::make_pair(candidate.tensor.scalar_type(), !candidate.tensor.requires_grad());
    kinds[kind].push_back(std::move(candidate));
  }
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  std::vector<std::vector<Candidate>> groups;
  for (auto& [kind, members] : kinds) {
    if (options.mesh.shard().traits().packing == Packing::OneBuffer) {
      groups.push_back(std::move(members));
    } else {
      for (auto& member : members) groups.push_back({std::move(member)});
    }
  }
  // All memory before the first parameter changes: where there is not enough, the model is as it was.
  std::vector<std::shared_ptr<at::DataPtr>> memory;
  for (const auto& group : groups) memory.push_back(unit->memory_->add(unit->plan(group)));
  for (size_t i = 0; i < groups.size(); i++) unit->add_group(std::move(groups[i]), std::move(memory[i]));
  unit->unsharded_bytes_ = unit->memory_->unsharded_bytes(unit->buffers());
  former.abandon();
  for (auto& group : unit->groups_) {
    if (group.flat) unit->parameters_[group.flat->shard.unsafeGetTensorImpl()] = &*group.flat;
    for (auto& parameter : group.parameters) {
      unit->parameters_[parameter.unsharded.lock().get()] = &parameter;
      if (!group.flat) unit->parameters_[parameter.shard.unsafeGetTensorImpl()] = &parameter;
    }
  }
  for (const auto& group : unit->groups_) watch(group.own_storage());
  attach_unit_node(unit);
  return unit;
}

Unit::~Unit() {
  schedule_->forget(*this);
}

at::ScalarType Unit::unsharded_dtype(at::ScalarType dtype) const {
  return at::isFloatingType(dtype) ? options_.mixed_precision.param_dtype.value_or(dtype) : dtype;
}

FlatLayout Unit::layout(std::span<const Candidate> candidates) const {
  const auto& shard = options_.mesh.shard();
  std::vector<int64_t> numels;
  for (const auto& candidate : candidates) numels.push_back(candidate.tensor.numel());
  if (shard.traits().packing != Packing::OneBuffer) return FlatLayout(numels.front(), shard.size());
  const auto alignment = kAlignment / static_cast<int64_t>(c10::elementSize(unsharded_dtype(candidates.front().tensor.scalar_type())));
  return FlatLayout(numels, alignment, shard.rank(), shard.size());
}

BufferPlan Unit::plan(std::span<const Candidate> candidates) const {
  const auto& first = candidates.front().tensor;
  return {.chunk = layout(candidates).chunk,
          .dtype = first.scalar_type(),
          .unsharded_dtype = unsharded_dtype(first.scalar_type()),
          .device = first.device(),
          .trained = first.requires_grad()};
}

void Unit::add_group(std::vector<Candidate> candidates, std::shared_ptr<at::DataPtr> memory) {
  const auto& shard = options_.mesh.shard();
  const auto& first = candidates.front().tensor;
  const auto layout = this->layout(candidates);
  Group group{.dtype = first.scalar_type(), .unsharded_dtype = unsharded_dtype(first.scalar_type()), .chunk = layout.chunk};
  const auto device = first.device();
  const bool together = shard.traits().packing == Packing::OneBuffer;

  const auto own_storage = tagged_storage(Role::Sharded, shared_from_this(), groups_.size(),
                                          static_cast<size_t>(layout.chunk) * c10::elementSize(group.dtype), device);
  lend(*own_storage.unsafeGetStorageImpl(), std::move(memory));
  group.own = memory_view(*own_storage.unsafeGetStorageImpl(), group.dtype).zero_();
  const auto unsharded_bytes = static_cast<size_t>(layout.chunk * shard.size()) * c10::elementSize(group.unsharded_dtype);
  const auto unsharded_storage = tagged_storage(Role::Unsharded, shared_from_this(), groups_.size(), unsharded_bytes, device);
  explain(*unsharded_storage.unsafeGetStorageImpl(), freed_message(name_));
  group.unsharded = c10::weak_intrusive_ptr<c10::StorageImpl>(unsharded_storage.getWeakStorageImpl());

  const auto listed = [&](int64_t numel, int64_t dim, int64_t offset, bool trained, size_t index) {
    const auto sizes = shard_sizes(numel, dim);
    std::vector<int64_t> strides(sizes.size(), 1);
    // What is empty lies nowhere. Its stride, which nobody needs, says which parameter it is of: see around().
    if (numel == 0) strides.front() = static_cast<int64_t>(index) + 1;
    auto shard = paged_view(own_storage, group.dtype, sizes, strides, offset);
    shard.set_requires_grad(trained);
    return shard;
  };
  if (options_.listing == Listing::Flat) {
    const auto numel = layout.chunk * shard.size();
    const auto name = fmt::format("flat_param_{}", groups_.size());
    group.flat = Parameter{.name = name,
                           .local_name = name,
                           .shard = listed(layout.chunk, 1, 0, first.requires_grad(), 0),
                           .sizes = {numel},
                           .strides = {1},
                           .span = {.numel = numel, .shard_numel = layout.chunk, .shard_begin = together ? shard.rank() * layout.chunk : 0},
                           .origin = {},
                           .unsharded = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                               c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>())};
  }

  for (size_t i = 0; i < candidates.size(); i++) {
    auto& tensor = candidates[i].tensor;
    const auto& span = layout.spans[i];
    const auto whole = dense(tensor);
    const auto values = in_memory_order(whole);
    if (options_.start == Start::FromRank0) options_.mesh.world().broadcast(values, 0, {.unit = name_}).wait();
    if (!shard.traits().traces) group.fingerprint = group.fingerprint * 31 + fingerprint(values);
    group.own.narrow(0, span.shard_offset, span.shard_numel)
        .copy_(together ? values.narrow(0, span.shard_begin, span.shard_numel) : shard.own_chunk(values));

    // The tensor that the model holds becomes a window on the full storage: same object, same sizes, other memory.
    const auto window = paged_view(unsharded_storage, group.unsharded_dtype, whole.sizes(), whole.strides(), span.offset);
    group.parameters.push_back(
        {.name = candidates[i].name,
         .local_name = candidates[i].name,
         .index = candidates[i].index,
         .shard = group.flat ? group.flat->shard : listed(span.shard_numel, tensor.dim(), span.shard_offset, tensor.requires_grad(), i),
         .sizes = whole.sizes().vec(),
         .strides = whole.strides().vec(),
         .span = span,
         .origin = c10::make_intrusive<Origin>(shared_from_this(), groups_.size(), i),
         .unsharded = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr())});
    // Not by set_data, which takes another dtype or a device that libtorch does not know for another kind of tensor.
    tensor.unsafeGetTensorImpl()->shallow_copy_from(window.getIntrusivePtr());
    UnshardedMeta::replace(tensor, group.parameters.back().shard, options_.listing);
    if (!group.flat) ShardedMeta::replace(group.parameters.back().shard, tensor);
    tensor = at::Tensor();
  }
  groups_.push_back(std::move(group));
}

void Unit::rename(const std::string& name) {
  name_ = name;
  for (auto& group : groups_) {
    if (const auto unsharded = group.unsharded.lock()) explain(*unsharded, freed_message(name_));
    group.gradient = {};  // says the old name, too
    // No table lists them, so they learn their names here.
    if (!group.flat) continue;
    for (auto& parameter : group.parameters) parameter.name = name + "." + parameter.local_name;
  }
}

void Unit::join(std::shared_ptr<Schedule> schedule) {
  schedule_ = std::move(schedule);
}

Unit::Buffers Unit::buffers() const {
  Buffers result;
  for (size_t i = 0; i < groups_.size(); i++) {
    const auto& group = groups_[i];
    if (auto unsharded = group.unsharded.lock()) {
      result.push_back({.number = i, .unsharded = std::move(unsharded), .unsharded_dtype = group.unsharded_dtype, .own = group.own});
    }
  }
  return result;
}

void Unit::unshard(const Fault& fault) {
  if (holds_memory()) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto all = buffers();
  expect_equal_start();
  state_ = State::Unsharding;
  try {
    publish(all);
    unsharding_ = memory_->read(all, subject(), fault);
  } catch (...) {
    reshard();
    throw;
  }
  counters_.gathers++;
  const auto ranks = static_cast<uint64_t>(options_.mesh.shard().size());
  counters_.gathered_bytes += unsharded_bytes_ / ranks * (ranks - 1);
}

void Unit::wait_for_unshard() {
  for (const auto& work : unsharding_) work.wait();
  unsharding_.clear();
  state_ = State::Unsharded;
}

void Unit::expect_equal_start() {
  if (start_checked_ || options_.mesh.world().traits().traces) return;  // one trace serves all replicas alike
  uint64_t all = 0;
  for (const auto& group : groups_) all = all * 31 + group.fingerprint;
  const auto own = static_cast<int64_t>(all >> 2);  // so that its negative exists
  const auto extremes = at::stack({at::full({}, own, at::kLong), at::full({}, -own, at::kLong)});
  options_.mesh.world().all_reduce(extremes, {.op = Reduce::Max}, {.unit = name_, .number = number_}).wait();
  if (extremes[0].item<int64_t>() != -extremes[1].item<int64_t>()) {
    throw UsageError(
        fmt::format("the ranks brought different parameters for unit '{}'; give them the same seed or file before they make the model, "
                    "or shard with {{.start = tessera::Start::FromRank0}}",
                    name_));
  }
  start_checked_ = true;
}

void Unit::reshard() {
  if (!holds_memory()) return;
  end_visit();
  memory_->reshard(buffers(), std::exchange(unsharding_, {}));
  state_ = State::Sharded;
}

void Unit::make_private() {
  memory_->make_private(buffers());
}

void Unit::follow_training(const at::Tensor& used) {
  const auto agrees = [](const UnshardedMeta* member) { return member == nullptr || member->requires_grad() == member->attached; };
  const auto pass = schedule_->pass_number();
  if (followed_ == pass && agrees(unsharded_meta(used))) return;
  const auto held = schedule_->lock();
  followed_ = pass;
  for (const auto& group : groups_) {
    for (const auto& parameter : group.parameters) {
      const at::Tensor unsharded(parameter.unsharded.lock());
      if (unsharded.defined() && !agrees(unsharded_meta(unsharded))) return attach_unit_node(shared_from_this());
    }
  }
}

Unit::Parameter* Unit::find(const at::Tensor& tensor) const {
  const auto known = parameters_.find(tensor.unsafeGetTensorImpl());
  if (known == parameters_.end()) return nullptr;
  auto& parameter = *known->second;
  // A view may have come to the place of a whole parameter that is gone.
  return parameter.shard.is_same(tensor) || parameter.unsharded.lock() == tensor.getIntrusivePtr() ? &parameter : nullptr;
}

Unit::Parameter* Unit::around(const at::Tensor& view) {
  const auto& tag = *tag_of(view);
  auto& parameters = groups_[tag.group].parameters;
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
  const auto* tag = tag_of(tensor);
  auto unit = tag != nullptr ? tag->unit.lock() : nullptr;
  if (!unit) return {};
  auto* const parameter = unit->find(tensor);
  if (parameter == nullptr) return {};
  auto& group = unit->groups()[tag->group];
  return {std::move(unit), &group, parameter};
}

}  // namespace tessera
