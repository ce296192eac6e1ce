#include "tessera/shard/unit/unit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit_node.h"
#include "tessera/shard/unit/unit_state.h"

namespace tessera {

/// A codec computes with the form that it makes of float32, unless that is float32 again.
std::optional<at::ScalarType> compute_dtype_of(const ShardOptions& options) {
  if (!options.codec) return options.mixed_precision.param_dtype;
  const auto computed = options.codec->computed(at::kFloat);
  return computed == at::kFloat ? std::nullopt : std::optional(computed);
}

Unit::Unit(std::string name, const ShardOptions& options, UnitLayout layout, CodecPtr codec)
    : name_(std::move(name)),
      options_(options),
      layout_(layout),
      codec_(std::move(codec)),
      compute_dtype_(compute_dtype_of(options)),
      number_(options.mesh.world().next_number()) {}

Unit::~Unit() {
  if (schedule_) schedule_->forget(*this);
}

std::string_view Unit::residence() const {
  return state_->memory().name();
}

std::string_view Unit::layout_name() const {
  switch (layout_) {
    case UnitLayout::Flat:
      return "flat";
    case UnitLayout::Rows:
      return "rows";
    case UnitLayout::WholeParameters:
      return "whole parameters";
    case UnitLayout::PaddedChunks:
      return "padded chunks";
  }
  return {};
}

void Unit::refuse_lock() {
  throw std::logic_error("the state of a unit was asked for with the lock of another schedule");
}

Unit::Buffers Unit::buffers() const {
  Buffers result;
  for (size_t i = 0; i < groups_.size(); i++) {
    const auto& group = groups_[i];
    if (auto unsharded = group.unsharded.lock()) {
      result.push_back({.number = i, .unsharded = std::move(unsharded), .own = group.own, .codec = codec_.get()});
    }
  }
  return result;
}

Subject Unit::subject() const {
  return state_->versions.subject();
}

void Unit::count_gather() {
  counters_.gathers++;
  counters_.gathered_bytes += state_->memory().gathered_bytes(buffers());
}

void Unit::join(std::shared_ptr<Schedule> schedule) {
  schedule_ = std::move(schedule);
  schedule_->add(*this);
  is_root_ = false;
}

uint64_t Unit::held_bytes() const {
  return state_->held_bytes();
}

bool Unit::stays_after_forward(const ScheduleLock& held) {
  return state(held).rules.reshard_after_forward.keeps(is_root_);
}

void Unit::set_reshard_after_forward(ReshardAfterForward rule) {
  const int size = mesh().shard().size(), ranks = rule.ranks(size);
  if (ranks < 1 || size % ranks != 0) {
    throw UsageError(
        fmt::format("reshard_after_forward = {}: a shard group of {} ranks does not fall into groups of {}; give a divisor of {}, true or "
                    "false",
                    ranks, size, ranks, size));
  }
  const auto held = schedule_->lock();
  if (!rule.keeps(/*is_root=*/false)) state(held).memory().divide_after_forward(ranks);
  state(held).rules.reshard_after_forward = rule;
}

bool Unit::is_reducing() const {
  return state_->reduction.in_flight();
}

void Unit::compute_squares() {
  state_->reduction.compute_squares();
}

void Unit::follow_training(const at::Tensor& used) {
  const auto agrees = [](const UnshardedMeta* meta) { return meta == nullptr || meta->requires_grad() == meta->attached; };
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

void Unit::note_values(const Parameter& parameter) {
  if (std::exchange(parameter.unset, false)) unset_--;
}

std::vector<const Unit::Parameter*> Unit::parameters_in(const at::Tensor& shard) const {
  const auto& group = groups_[tag_of(shard)->group];
  if (!group.flat) return {around(shard)};
  std::vector<const Parameter*> result;
  const bool is_all = shard.numel() == group.chunk;  // also of what is empty here, and has its values on other ranks
  const auto begin = shard.storage_offset(), end = begin + shard.numel();
  for (const auto& parameter : group.parameters) {
    const auto& span = parameter.span;
    if (is_all || (span.shard_offset < end && begin < span.shard_offset + span.shard_numel)) result.push_back(&parameter);
  }
  return result;
}

void Unit::note_values(const at::Tensor& shard) {
  for (const auto* parameter : parameters_in(shard)) note_values(*parameter);
}

std::vector<std::string> Unit::unset_names() const {
  std::vector<std::string> names;
  for (const auto& group : groups_) {
    for (const auto& parameter : group.parameters) {
      if (parameter.unset) names.push_back(parameter.name);
    }
  }
  return names;
}

void Unit::expect_values(std::string_view what) const {
  if (!has_unset()) return;
  throw UsageError(
      fmt::format("{} needs the values of {}, but nobody has loaded or initialised them: load_weights, checkpoint::load and "
                  "load_full_state_dict load parameters, ShardOptions::param_init_fn initialises those of a module on the meta device, and "
                  "deferred_init records how a module makes its own",
                  what, some_of(unset_names())));
}

void Unit::expect_values_of(const at::Tensor& shard, std::string_view what) const {
  const auto parameters = parameters_in(shard);
  if (std::ranges::any_of(parameters, [](const Parameter* parameter) { return parameter->unset; })) expect_values(what);
}

void Unit::outdate(const at::Tensor& written) {
  const auto outdate_one = [](const Parameter& parameter) {
    if (const auto unsharded = parameter.unsharded.lock()) unsharded->bump_version();
  };
  const auto outdate_all = [&](const Group& group) { std::ranges::for_each(group.parameters, outdate_one); };
  if (!written.defined()) return std::ranges::for_each(groups_, outdate_all), void();
  const auto& group = groups_[tag_of(written)->group];
  if (group.flat) return outdate_all(group);
  if (written.numel() == 0) {  // empty on this rank, but other ranks write their part of the parameter
    outdate_one(*around(written));
    return;
  }
  auto end = written.storage_offset() + 1;
  for (int64_t i = 0; i < written.dim(); i++) end += (written.size(i) - 1) * written.stride(i);
  const auto lies_before = [&](const Parameter& parameter) {
    return parameter.span.shard_offset + parameter.span.shard_numel <= written.storage_offset();
  };
  auto each = std::ranges::partition_point(group.parameters, lies_before);
  for (; each != group.parameters.end() && each->span.shard_offset < end; ++each) {
    if (each->span.shard_numel > 0) outdate_one(*each);
  }
}

const Unit::Parameter* Unit::find(const at::Tensor& tensor) const {
  const auto known = parameters_.find(tensor.unsafeGetTensorImpl());
  if (known == parameters_.end()) return nullptr;
  const auto& parameter = *known->second;
  // A new tensor may have the address of an unsharded parameter that no longer exists.
  return parameter.shard.is_same(tensor) || parameter.unsharded.lock() == tensor.getIntrusivePtr() ? &parameter : nullptr;
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

std::vector<ValueRange> Unit::ranges_of(const Parameter& parameter) const {
  const auto& span = parameter.span;
  if (layout_ != UnitLayout::PaddedChunks) return {{.begin = span.shard_begin, .numel = span.shard_numel}};
  std::vector<ValueRange> ranges;
  for (const int rank : mesh().world().local_ranks()) {
    const auto begin = std::min(rank % mesh().shape().shard * span.shard_numel, span.numel);
    ranges.push_back({.begin = begin, .numel = std::min(span.numel - begin, span.shard_numel)});
  }
  return ranges;
}

Located locate(const at::Tensor& tensor) {
  if (!is_paged(tensor)) {  // it may be a member that shows what the shards hold
    const auto* const meta = tensor.defined() ? unsharded_meta(tensor) : nullptr;
    return meta != nullptr ? locate(meta->shard()) : Located();
  }
  const auto* tag = tag_of(tensor);
  auto unit = tag != nullptr ? tag->unit.lock() : nullptr;
  if (!unit) return {};
  const auto* const parameter = unit->find(tensor);
  if (parameter == nullptr) return {};
  const auto& group = unit->groups()[tag->group];
  return {std::move(unit), &group, parameter};
}

}  // namespace tessera
