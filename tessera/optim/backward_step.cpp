// Updates the units of a model while backward runs.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/record.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/update_range.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/shard_place.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"

namespace tessera::optim {
namespace {

/// Returns a view of `count` values of a dense tensor from `begin` on, in memory order.
at::Tensor in_memory_order(const at::Tensor& dense, int64_t begin, int64_t count) {
  return dense.as_strided({count}, {1}, dense.storage_offset() + begin);
}

}  // namespace

/// Receives the gradients of the optimizer's shards from their units, and updates the shards. Units have only a weak reference to this
/// object, so it ends when the optimizer drops it.
class Optimizer::BackwardStep final : public GradientSink {
 public:
  explicit BackwardStep(Optimizer& optimizer);

  bool takes(const at::Tensor& shard) const override { return shards_.contains(shard.unsafeGetTensorImpl()); }
  const std::string& writer() override;
  void take(const std::shared_ptr<Unit>& unit, std::span<const at::Tensor> shards, const Mean& mean) override;

  std::span<const std::weak_ptr<Unit>> units() const { return units_; }
  /// The optimizer's destructor calls it, because a running backward pass may keep this object alive longer.
  void forget_optimizer() { optimizer_ = nullptr; }

 private:
  using Shards = std::unordered_set<const c10::TensorImpl*>;

  Optimizer& optimizer() const;
  void update(const Settings& settings, Section& section, const WriteGuard& guard, const Shards& with_gradient, const Mean& mean) const;

  Optimizer* optimizer_;
  Shards shards_;
  std::vector<std::weak_ptr<Unit>> units_;
};

Optimizer::BackwardStep::BackwardStep(Optimizer& optimizer) : optimizer_(&optimizer) {
  for (const auto& group : optimizer.groups_) {
    for (const auto& section : group.sections) {
      if (section.unit.expired()) continue;
      for (const auto& member : section.members) shards_.insert(member.parameter.unsafeGetTensorImpl());
      const auto is_of_section = [&](const auto& known) { return !known.owner_before(section.unit) && !section.unit.owner_before(known); };
      if (std::ranges::none_of(units_, is_of_section)) units_.push_back(section.unit);
    }
  }
}

Optimizer& Optimizer::BackwardStep::optimizer() const {
  if (optimizer_ == nullptr) throw UsageError("an optimizer that steps in backward was destroyed while backward ran; keep it until backward() has returned");
  return *optimizer_;
}

const std::string& Optimizer::BackwardStep::writer() {
  return optimizer().description();
}

void Optimizer::BackwardStep::take(const std::shared_ptr<Unit>& unit, std::span<const at::Tensor> shards, const Mean& mean) {
  const c10::AutoGradMode no_grad(false);
  const WriteGuard guard(std::span(&unit, 1), optimizer().kind_of_write(), writer());
  const BelowPaging below;
  Shards with_gradient;
  for (const auto& shard : shards) with_gradient.insert(shard.unsafeGetTensorImpl());
  for (auto& group : optimizer().groups_) {
    for (auto& section : group.sections) {
      if (section.unit.lock() != unit) continue;
      update(group.settings, section, guard, with_gradient, mean);
      evict(section);
    }
  }
  guard.commit();
}

/// Computes the gradient of one part at a time, into memory that stays in the cache until the rule reads it.
void Optimizer::BackwardStep::update(const Settings& settings, Section& section, const WriteGuard& guard, const Shards& with_gradient,
                                     const Mean& mean) const {
  const auto has_gradient = [&](const Member& member) { return with_gradient.contains(member.parameter.unsafeGetTensorImpl()); };
  if (std::ranges::none_of(section.members, has_gradient)) return;
  optimizer().make_state(section);
  const auto cast_copy = guard.cast_copy(section.flat);
  const auto most = kGrain * at::get_num_threads();
  const auto scratch = at::empty({std::min(section.flat.numel(), most)}, section.flat.options());
  const auto kinds = optimizer().kinds_of(section);
  const auto update_part = [&](std::span<Member> members, int64_t first, int64_t count) {
    for (auto& member : members) {
      member.steps++;
      guard.outdate(member.parameter);
    }
    for (auto begin = first; begin < first + count; begin += most) {
      const auto size = std::min(most, first + count - begin);
      const auto parameter = in_memory_order(section.flat, begin, size), gradient = scratch.narrow(0, 0, size);
      mean(parameter, gradient);
      c10::SmallVector<at::Tensor, 4> state;
      for (size_t i = 0; i < kinds.size(); i++) {
        const auto block = kinds[i].block;
        state.push_back(in_memory_order(section.state[i], begin / block, (size + block - 1) / block));
      }
      optimizer().apply(settings, members.front().steps,
                        {.parameter = parameter,
                         .gradient = gradient,
                         .state = state,
                         .cast_copy = cast_copy.defined() ? cast_copy.narrow(0, begin, size) : cast_copy,
                         .members = members,
                         .factor = {}});
    }
  };
  const auto like_first = [&](const Member& member) { return has_gradient(member) && member.steps == section.members.front().steps; };
  if (std::ranges::all_of(section.members, like_first)) return update_part(section.members, 0, section.flat.numel());
  for (auto& member : section.members) {
    if (has_gradient(member)) update_part(std::span(&member, 1), member.offset, member.parameter.numel());
  }
}

Optimizer::~Optimizer() {
  if (backward_step_) backward_step_->forget_optimizer();
  if (record_) record_->remove_optimizer(this);
}

void Optimizer::step_in_backward() {
  expect_idle("step_in_backward");
  if (backward_step_) return;
  if (!can_step_in_backward()) {
    throw UsageError("{} needs the gradients of all parameters before it changes one; call step() after backward", rule_);
  }
  forget_stale_factor();
  if (factor_.defined()) throw UsageError("step_in_backward: the gradients of a step are scaled already; call step() first");
  auto next = std::make_shared<BackwardStep>(*this);
  if (next->units().empty()) throw UsageError("step_in_backward: none of the parameters is a shard; shard the model first, or call step()");
  // Units refer to the sink weakly: if set_gradient_sink() throws for one unit, the others forget the sink when `next` is destroyed.
  for (const auto& known : next->units()) {
    if (const auto unit = known.lock()) set_gradient_sink(*unit, next);
  }
  backward_step_ = std::move(next);
}

/// Returns whether units were updated in backward since the last step.
bool Optimizer::end_backward_step() {
  bool stepped = false;
  if (!backward_step_) return stepped;
  for (const auto& known : backward_step_->units()) {
    if (const auto unit = known.lock()) stepped |= tessera::end_step(*unit);
  }
  return stepped;
}

void Optimizer::refuse_in_backward(std::string_view what) const {
  if (!backward_step_) return;
  throw UsageError(
      "{}: this optimizer steps in backward, where each unit is updated before the gradients of the others are known; call "
      "step_after_backward() first",
      what);
}

}  // namespace tessera::optim
