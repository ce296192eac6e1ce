#include "tessera/shard/unit/stored_form.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/base/log.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/unit/gathered.h"
#include "tessera/shard/unit/unit_state.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

void give(const at::Tensor& member, const at::Tensor& view) {
  member.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

}  // namespace

std::atomic<int> StoredForm::count_ = 0;

bool StoredForm::differs(const Unit& unit, const Unit::Group& group) {
  return unit.codec().encodes(group.dtype) || unit.codec().decodes(group.dtype);
}

StoredForm::StoredForm(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {
  expect_shards_current(*unit_);
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (const auto& group : unit_->groups()) {
    auto unsharded = group.unsharded.lock();
    if (!unsharded || !differs(*unit_, group)) continue;
    kept_.push_back(std::move(unsharded));
    const auto all = gathered(*unit_, group, group.own);
    for (const auto& parameter : group.parameters) {
      const at::Tensor member(parameter.unsharded.lock());
      if (!is_paged(member)) continue;  // its module is gone, or it shows the stored form already
      give(member, unsharded_view(all, parameter));
      shown_.push_back({.group = &group, .parameter = &parameter, .member = member, .version = member._version()});
    }
  }
  count_++;
}

StoredForm::~StoredForm() {
  count_--;
  for (const auto& [group, parameter, member, version] : shown_) {
    if (member._version() != version) {
      log(LogLevel::Error, fmt::format("what was written to '{}' inside full_params(module, Access::ReadStored) is lost; write inside "
                                       "full_params(module, Access::Write)",
                                       parameter->name));
    }
    give(member, paged_view(c10::Storage(group->unsharded.lock()), group->unsharded_dtype, parameter->sizes, parameter->strides,
                            parameter->span.offset));
  }
}

bool StoredForm::is_shown(const torch::nn::Module& module) {
  if (count_ == 0) return false;
  return std::ranges::any_of(units(module), [](const std::shared_ptr<Unit>& unit) {
    return std::ranges::any_of(unit->groups(), [&](const Unit::Group& group) {
      const at::Tensor member(group.parameters.front().unsharded.lock());
      return differs(*unit, group) && member.defined() && !is_paged(member);
    });
  });
}

bool StoredForm::is_used(const torch::nn::Module& module) {
  return is_shown(module) || (UnitState::some_are_private() && std::ranges::any_of(units(module), &Unit::shows_stored));
}

}  // namespace tessera
