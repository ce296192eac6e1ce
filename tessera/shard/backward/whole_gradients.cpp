#include "tessera/shard/backward/whole_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {
namespace {

template <class Visit>
void for_each_member(const Unit::Group& group, const Visit& visit) {
  for (const auto& parameter : group.parameters) {
    const auto unsharded = parameter.unsharded.lock();
    if (unsharded.defined()) visit(parameter, *unsharded_meta(unsharded));
  }
}

}  // namespace

at::Tensor own_gradients(Unit& unit, const Unit::Group& group) {
  unit.schedule()->finish_reductions();
  const BelowPaging below;
  at::Tensor own;
  for (const auto& parameter : group.listed()) {
    const auto& gradient = parameter.shard.grad();
    if (!gradient.defined()) continue;
    if (!own.defined()) own = at::zeros({group.chunk}, gradient.options());
    parameter.in_chunk(own).copy_(gradient.reshape({-1}));
  }
  return own;
}

WholeGradients::WholeGradients(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& group : unit_->groups()) {
    const auto own = own_gradients(*unit_, group);
    all_.push_back(own.defined() ? LockedState(*unit_)->gathered(group, own) : own);
  }
  for (size_t i = 0; i < all_.size(); i++) {
    for (const auto& parameter : unit_->groups()[i].listed()) {
      const auto& gradient = parameter.shard.grad();
      seen_.emplace_back(gradient, gradient.defined() ? gradient._version() : 0);
    }
    for_each_member(unit_->groups()[i], [&](const Unit::Parameter& parameter, UnshardedMeta& meta) {
      meta.whole_gradient = parameter.shard.grad().defined() ? parameter.in(all_[i]) : at::Tensor();
    });
  }
}

WholeGradients::~WholeGradients() {
  for (const auto& group : unit_->groups())
    for_each_member(group, [](const Unit::Parameter& /*parameter*/, UnshardedMeta& meta) { meta.whole_gradient.reset(); });
}

void WholeGradients::expect_sound() const {
  auto seen = seen_.begin();
  for (const auto& group : unit_->groups()) {
    for (const auto& parameter : group.listed()) {
      const auto& [before, version] = *seen++;
      const auto& gradient = parameter.shard.grad();
      if (gradient.is_same(before) && (!before.defined() || before._version() == version)) continue;
      throw UsageError("the gradient of the shard of '{}' was changed as well, by zero_grad() or the like", parameter.name);
    }
    for_each_member(group, [&](const Unit::Parameter& parameter, const UnshardedMeta& meta) {
      const auto& gradient = *meta.whole_gradient;
      if (!gradient.defined() || gradient.sizes() == at::IntArrayRef(parameter.sizes)) return;
      throw UsageError("the gradient of '{}' was given another shape than the parameter", parameter.name);
    });
  }
}

void WholeGradients::write_back(bool alone) {
  if (alone) {
    expect_sound();
    return hand_over();
  }
  const auto& world = unit_->mesh().world();
  all_or_none(world, {.unit = "gradients that are written back"}, "can't write back its gradients", [&] { expect_sound(); });
  if (world.traits().can_differ()) {
    std::string lines;
    for (const auto& group : unit_->groups()) {
      for_each_member(group, [&](const Unit::Parameter& parameter, const UnshardedMeta& meta) {
        lines += fmt::format("'{}'\t{}\n", parameter.name, meta.whole_gradient->defined() ? "a gradient" : "no gradient");
      });
    }
    const auto different = difference_on_ranks(world, lines, {.unit = "gradients that are written back"});
    if (!different.empty()) throw DisagreementError("the ranks have written gradients of different parameters; " + different);
  }
  hand_over();
}

void WholeGradients::hand_over() {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < all_.size(); i++) {
    const auto& group = unit_->groups()[i];
    auto& all = all_[i];
    for_each_member(group, [&](const Unit::Parameter& parameter, UnshardedMeta& meta) {
      const auto& gradient = *meta.whole_gradient;
      if (!gradient.defined()) return;
      if (!all.defined()) all = at::zeros({group.chunk * unit_->mesh().shard().size()}, gradient.options().dtype(group.gradient_dtype));
      const auto place = parameter.in(all);
      if (gradient.const_data_ptr() != place.const_data_ptr()) place.copy_(gradient);
    });
    const auto own = all.defined() ? unit_->mesh().shard().own_chunk(all) : all;
    const auto hand = [&](const Unit::Parameter& parameter, bool has_gradient) {
      auto& gradient = parameter.shard.mutable_grad();
      if (!has_gradient) {
        gradient = at::Tensor();
        return;
      }
      if (!gradient.defined()) gradient = at::zeros_like(parameter.shard, at::TensorOptions().dtype(group.gradient_dtype));
      gradient.copy_(parameter.in_chunk(own).view(gradient.sizes()));
    };
    if (group.flat) {
      hand(*group.flat, own.defined());
    } else {
      for_each_member(
          group, [&](const Unit::Parameter& parameter, const UnshardedMeta& meta) { hand(parameter, meta.whole_gradient->defined()); });
    }
  }
}

void WholeGradients::lose(const std::string& why) {
  const c10::AutoGradMode no_grad(false);
  const auto had_some = std::ranges::any_of(seen_, [](const auto& seen) { return seen.first.defined(); });
  std::vector<at::Tensor> lost;
  bool has_some = false;
  for (const auto& group : unit_->groups())
    for (const auto& parameter : group.listed()) has_some |= parameter.shard.grad().defined();
  if (had_some && !has_some) return;  // zero_grad() has removed the gradients, so no step can take lost ones
  for (const auto& group : unit_->groups()) {
    for (const auto& parameter : group.listed()) {
      if (!parameter.shard.requires_grad()) continue;
      auto& gradient = parameter.shard.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter.shard, at::TensorOptions().dtype(group.gradient_dtype));
      gradient.fill_(std::numeric_limits<double>::quiet_NaN());
      lost.push_back(gradient);
    }
  }
  LockedState(*unit_)->reduction.lose(lost, why);
}

}  // namespace tessera
