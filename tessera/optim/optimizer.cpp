#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <set>

#include "tessera/base/dynamic_code.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/comm/recorded.h"
#include "tessera/comm/run_facts.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/shard_place.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"

namespace tessera::optim {
namespace {

void expect_leaf(const at::Tensor& parameter) {
  if (!parameter.defined() || !parameter.is_leaf()) {
    throw UsageError(
        "an optimizer was given a tensor that is not a leaf (it is undefined, the result of an operation, or an unsharded parameter "
        "of a sharded model); pass tessera::parameters(model)");
  }
  if (parameter.is_complex()) {
    throw UsageError("an optimizer of Tessera was given a complex parameter; use one of torch::optim, which takes complex shards, too");
  }
}

int64_t whole_numel(const at::Tensor& parameter) {
  const auto info = shard_info(parameter);
  return info ? c10::multiply_integers(info->shape) : parameter.numel();
}

/// Warns once in a process if there are several ranks and nothing averages the gradients of these parameters.
void warn_of_ranks_apart(std::span<const at::Tensor> parameters) {
  const auto identity = [] {
    try {
      return identity_from_environment();
    } catch (const ConfigError&) {  // not reported here, because init() reports it
      return std::optional<Identity>();
    }
  }();
  if (!identity || identity->world_size == 1 || identity->rank != 0 || std::ranges::all_of(parameters, is_ignored)) return;
  static std::once_flag once;
  std::call_once(once, [&] {
    log(LogLevel::Warning,
        fmt::format(
            "an optimizer was given no parameter of a sharded model, so each of the {} ranks trains by itself; call "
            "tessera::fully_shard(model, {{.mesh = world}}) before the optimizer is made, or tessera::average_gradients before its step",
            identity->world_size));
  });
}

bool has_whole_blocks(const at::Tensor& parameter, const ShardPlace& place) {
  return whole_numel(parameter) >= DynamicCode::kLeast && (!place || place.is_cut_at_multiples_of(DynamicCode::kBlock));
}

void read_ahead(std::span<const at::Tensor> state) {
  for (const auto& tensor : state) read_pages_ahead(tensor.const_data_ptr(), tensor.nbytes());
}

}  // namespace

void Optimizer::expect_rate(double lr) {
  expect_option("lr", lr);
}

void Optimizer::expect_option(std::string_view name, double value, double below) {
  if (std::isfinite(value) && value >= 0 && value < below) return;
  const auto range = std::isinf(below) ? std::string("a number of at least 0") : fmt::format("at least 0 and below {}", below);
  throw UsageError("the option {} of an optimizer is {}; it must be {}", name, value, range);
}

Optimizer::Optimizer(std::vector<ParameterGroup> groups, Settings settings, std::vector<StateKind> state_kinds, std::string rule,
                     std::vector<StateKind> in_blocks)
    : state_kinds_(std::move(state_kinds)), in_blocks_(std::move(in_blocks)), rule_(std::move(rule)) {
  expect_rate(settings.lr);
  for (const auto& group : groups) expect_rate(group.lr.value_or(0));
  expect_option("weight_decay", settings.weight_decay);
  for (const auto& group : groups) expect_option("weight_decay", group.weight_decay.value_or(0));
  for (const auto* kinds : {&state_kinds_, &in_blocks_}) {
    for (const auto& kind : *kinds) {
      if (kind.name.ends_with("_scales") != (kind.block > 1))
        throw UsageError("state '{}': the name must end in _scales if the state has one value for each block, and only then", kind.name);
    }
  }
  std::set<c10::TensorImpl*> seen;
  for (const auto& group : groups) parameters_.insert(parameters_.end(), group.parameters.begin(), group.parameters.end());
  for (const auto& parameter : parameters_) expect_leaf(parameter);
  expect_averaged(parameters_);
  for (auto& group : groups) {
    for (const auto& parameter : group.parameters) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError(
            "an optimizer was given the same parameter twice; each belongs to one group, once. tessera::parameters(model) lists tied "
            "parameters once, model->parameters() lists them under each of their names");
      }
      if (const auto place = place_of(parameter)) find_or_add(worlds_, place.mesh().world());
    }
    const double rate = group.lr.value_or(settings.lr);
    const double first = groups_.empty() ? rate : lr();
    groups_.push_back({.settings = {.lr = rate, .weight_decay = group.weight_decay.value_or(settings.weight_decay)},
                       .ratio = rate == first ? 1 : rate / first,
                       .sections = sections_of(std::move(group.parameters))});
  }
  if (seen.empty()) throw UsageError("an optimizer was given no parameters");
  if (worlds_.empty()) warn_of_ranks_apart(parameters_);
  record_ = worlds_.empty() ? first_record() : worlds_.front().record();
  if (record_) record_->add_optimizer(this);
}

std::vector<Optimizer::Section> Optimizer::sections_of(std::vector<at::Tensor> parameters) const {
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  std::vector<Section> sections;
  ShardPlace last;
  for (auto& parameter : parameters) {
    const auto place = place_of(parameter);
    const bool in_blocks = !in_blocks_.empty() && has_whole_blocks(parameter, place);
    // State in blocks can be divided only at multiples of a block, so parameters that have it are updated one by one.
    const bool adjacent = !in_blocks && place.follows(last) && !sections.back().in_blocks;
    const auto offset = parameter.storage_offset();
    if (adjacent) {
      auto& section = sections.back();
      const auto begin = section.members.front().parameter.storage_offset();
      section.members.push_back({.parameter = parameter, .offset = offset - begin});
      section.flat = section.members.front().parameter.detach().as_strided({offset + parameter.numel() - begin}, {1}, begin);
    } else {
      sections.push_back({.members = {{.parameter = parameter}}, .unit = place.unit, .flat = parameter, .in_blocks = in_blocks});
    }
    last = place;
  }
  return sections;
}

/// The gradients of a section as one tensor, or undefined if they are not adjacent in the same way as the parameters.
at::Tensor Optimizer::flat_gradient(const Section& section) {
  const auto& first = section.members.front().parameter.grad();
  if (!first.defined()) return {};
  for (const auto& member : section.members) {
    const auto& gradient = member.parameter.grad();
    const bool fits = gradient.defined() && member.steps == section.members.front().steps && gradient.is_contiguous() &&
                      gradient.scalar_type() == first.scalar_type() && gradient.storage().is_alias_of(first.storage()) &&
                      gradient.storage_offset() == first.storage_offset() + member.offset;
    if (!fits) return {};
  }
  return first.as_strided(section.flat.sizes(), section.flat.strides(), first.storage_offset());
}

/// Removes state and gradients from memory. Has no effect on tensors that are not disk-backed.
void Optimizer::evict(const Section& section) {
  for (const auto& state : section.state) evict_pages(state.const_data_ptr(), state.nbytes());
  for (const auto& member : section.members) {
    if (const auto& gradient = member.parameter.grad(); gradient.defined() && gradient.has_storage())
      evict_pages(gradient.const_data_ptr(), gradient.nbytes());
  }
}

void Optimizer::step_section(const Settings& settings, Section& section, const WriteGuard& guard) {
  if (!has_gradient(section)) return;
  make_state(section);  // made only for sections with a gradient, so that frozen parameters never have state
  const auto update_part = [&](const at::Tensor& parameter, const at::Tensor& gradient, std::span<const at::Tensor> state,
                               std::span<Member> members, const at::Tensor& cast_copy) {
    for (auto& member : members) {
      member.steps++;
      guard.outdate(member.parameter);
    }
    // The kernels ignore strides and update memory in order, so a parameter with gaps is updated in a dense copy.
    const bool has_gaps = !parameter.is_non_overlapping_and_dense();
    const auto target = has_gaps ? at::empty_like(parameter).copy_(parameter) : parameter;
    const bool same_dtype = gradient.scalar_type() == target.scalar_type();
    const bool alike = gradient.strides() == target.strides() && same_dtype;
    // An unscaled gradient may overflow in the dtype of the parameter, so it is scaled before it is cast.
    const bool is_scaled = !same_dtype && factor_.defined();
    const auto factor = factor_.defined() && target.is_cpu() ? factor_.cpu() : factor_;
    const auto wide = [&] { return gradient.to(at::promoteTypes(gradient.scalar_type(), at::kFloat)) * factor.squeeze(); };
    apply(settings, members.front().steps,
          {.parameter = target,
           .gradient = alike ? gradient : at::empty_like(target).copy_(is_scaled ? wide() : gradient),
           .state = state,
           .cast_copy = cast_copy,
           .members = members,
           .factor = is_scaled ? at::Tensor() : factor});
    if (has_gaps) parameter.copy_(target);
  };
  const auto cast_copy = guard.cast_copy(section.flat);
  const auto gradient = section.members.size() == 1 ? section.members.front().parameter.grad() : flat_gradient(section);
  if (gradient.defined()) return update_part(section.flat, gradient, section.state, section.members, cast_copy);
  for (auto& member : section.members) {
    if (!member.parameter.grad().defined()) continue;
    c10::SmallVector<at::Tensor, 2> state;
    for (const auto& flat : section.state) state.push_back(part(section, flat, member));
    update_part(member.parameter, member.parameter.grad(), state, std::span(&member, 1),
                cast_copy.defined() ? cast_copy.narrow(0, member.offset, member.parameter.numel()) : cast_copy);
  }
}

bool Optimizer::has_gradient(const Section& section) {
  return std::ranges::any_of(section.members, [](const Member& member) { return member.parameter.grad().defined(); });
}

/// Throws UsageError if a step would leave out gradients that have not been reduced. Checks all units, because shards with such gradients
/// need not have a `.grad`.
void Optimizer::expect_all_synced() const {
  const Unit* last = nullptr;
  for (const auto& group : groups_) {
    for (const auto& section : group.sections) {
      const auto unit = section.unit.lock();
      if (unit && unit.get() != last) expect_synced(*unit);
      last = unit.get();
    }
  }
}

/// The units that the next step changes.
std::span<const std::shared_ptr<Unit>> Optimizer::units_with_gradients() {
  for (const auto& group : groups_) {
    for (const auto& section : group.sections) {
      auto unit = section.unit.lock();
      if (unit && has_gradient(section) && std::ranges::find(units_, unit) == units_.end()) units_.push_back(std::move(unit));
    }
  }
  return units_;
}

/// Describes the rule and its settings, for ranks to compare. Counts only parameters that are on all ranks, because the numbers of other
/// parameters differ among ranks. Replaces the end of a long text by a hash, because an Envelope has room only for the beginning.
const std::string& Optimizer::description() {
  if (!description_.empty()) return description_;
  description_ = rule_;
  for (const auto& group : groups_) {
    size_t parameters = 0;
    for (const auto& section : group.sections) {
      const auto place = place_of(section.members.front().parameter);
      if (!place || place.is_on_all_ranks()) parameters += section.members.size();
    }
    description_ +=
        fmt::format("; lr {} and weight decay {} for {} parameters", group.settings.lr, group.settings.weight_decay, parameters);
  }
  constexpr size_t kLongest = 160;
  if (description_.size() > kLongest) {
    const auto hash = std::hash<std::string>()(description_);
    description_ = fmt::format("{}... #{:x}", description_.substr(0, kLongest), hash);
  }
  return description_;
}

/// Empties the list of units at the end of a step, so that optimizers do not keep units alive between steps.
struct Optimizer::Releases {
  std::vector<std::shared_ptr<Unit>>& units;
  ~Releases() { units.clear(); }
};

WriteKind Optimizer::kind_of_write() const {
  return writes_cast_copies() ? WriteKind::UpdateWithCopies : WriteKind::Update;
}

void Optimizer::step() {
  const Calling calling("optimizer.step");
  {
    const Recorded recorded(record_.get(), Activity::Optimizer, "step");
    update_all();
  }
  if (record_) record_->end_step(this);
}

void Optimizer::update_all() {
  expect_idle("step()");
  expect_all_synced();
  const c10::AutoGradMode no_grad(false);
  expect_ignored_alike(parameters_);
  const Releases after{units_};
  if (!end_backward_step()) expect_gradients(parameters_);
  units_with_gradients();
  const WriteGuard guard(units_, kind_of_write(), description());
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  forget_stale_factor();
  begin_step();
  for (auto& group : groups_) {
    for (size_t i = 0; i < group.sections.size(); i++) {
      if (i + 1 < group.sections.size()) read_ahead(group.sections[i + 1].state);
      step_section(group.settings, group.sections[i], guard);
      evict(group.sections[i]);
    }
  }
  end_step();
  factor_ = at::Tensor();
  guard.commit();
  ends_step_ = true;
}

void Optimizer::skip_step() {
  const Calling calling("optimizer.skip_step");
  expect_idle("skip_step()");
  expect_all_synced();
  expect_ignored_alike(parameters_);
  if (end_backward_step()) {
    throw UsageError("skip_step: the optimizer has stepped in backward already; to leave a step out, don't call backward() for it");
  }
  const Releases after{units_};
  WriteGuard(units_with_gradients(), WriteKind::Skip, description()).commit();
  factor_ = at::Tensor();
  ends_step_ = true;
}

void Optimizer::scale_gradients(const at::Tensor& factor) {
  refuse_in_backward("scale_gradients");
  if (!factor.defined() || factor.numel() != 1) throw UsageError("scale_gradients takes a scalar; give one factor for all gradients");
  forget_stale_factor();
  factor_ = factor_.defined() ? factor_ * factor : factor;
  recoveries_ = recoveries_of(parameters_);
}

/// Forgets the factor if tessera::recover has dropped the gradients for which it was set.
void Optimizer::forget_stale_factor() {
  if (factor_.defined() && recoveries_of(parameters_) != recoveries_) factor_ = at::Tensor();
}

at::Tensor Optimizer::grad_norm(double p) {
  refuse_in_backward("grad_norm");
  const auto norm = tessera::grad_norm(parameters_, {.p = p});
  forget_stale_factor();
  return factor_.defined() ? norm * factor_.abs() : norm;
}

at::Tensor Optimizer::clip_grad_norm(double max_norm, double p) {
  refuse_in_backward("clip_grad_norm");
  expect_max_norm(max_norm);
  const auto norm = grad_norm(p);
  scale_gradients(clip_factor(norm, max_norm));
  return norm;
}

void Optimizer::zero_grad() {
  factor_ = at::Tensor();
  for (const auto& group : groups_) {
    for (const auto& section : group.sections) {
      const auto unit = section.unit.lock();
      for (const auto& member : section.members) {
        member.parameter.mutable_grad() = at::Tensor();
        if (unit) drop_unsynced(*unit, member.parameter);
      }
    }
  }
  // step_done() is not called in step(), because gradients that still exist there would become results of the program that a tracing engine
  // ends.
  if (!std::exchange(ends_step_, false)) return;
  for (const auto& world : worlds_) world.step_done();
}

void Optimizer::set_lr(double lr) {
  expect_rate(lr);
  if (std::ranges::any_of(groups_, [](const Group& group) { return std::isinf(group.ratio); })) {
    throw UsageError(
        "set_lr: the first group began with a rate of 0 and another with more, so there is no ratio to keep; put a group with a "
        "positive rate first");
  }
  for (auto& group : groups_) group.settings.lr = lr * group.ratio;
  description_.clear();
}

std::vector<ParameterGroup> Optimizer::groups() const {
  std::vector<ParameterGroup> result;
  for (const auto& group : groups_) {
    auto& made =
        result.emplace_back(ParameterGroup{.parameters = {}, .lr = group.settings.lr, .weight_decay = group.settings.weight_decay});
    for (const auto& section : group.sections) {
      for (const auto& member : section.members) made.parameters.push_back(member.parameter);
    }
  }
  return result;
}

}  // namespace tessera::optim
