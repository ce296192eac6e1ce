#include "tessera/shard/full_params.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/shard/marker.h"
#include "tessera/shard/model.h"
#include "tessera/shard/schedule.h"
#include "tessera/shard/unit.h"

namespace tessera {
namespace {

/// Where a shard belongs; only shards will do.
Located located_shard(const at::Tensor& shard) {
  auto found = locate(shard);
  if (found.parameter == nullptr || !found.parameter->shard.is_same(shard)) {
    throw UsageError("this tensor is no shard; pass one of tessera::parameters(model)");
  }
  return found;
}

/// The whole of something that is cut like the parameters of the group.
at::Tensor whole_of(const Located& found, const at::Tensor& own_flat) {
  const auto& shard = found.unit->mesh().shard();
  const auto whole = at::empty({found.group->chunk * shard.size()}, own_flat.options());
  const Piece piece{.whole = whole, .own = own_flat};
  shard.all_gather(std::span(&piece, 1), {.unit = found.unit->name()}).wait();
  const auto& parameter = *found.parameter;
  return whole.as_strided(parameter.sizes, parameter.strides, parameter.span.offset).clone();
}

}  // namespace

FullParams full_params(const torch::nn::Module& module, Access access) {
  FullParams guard;
  guard.access_ = access;
  for (auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    Unit* const wanted[] = {unit.get()};
    schedule->use(wanted, {});
    if (access == Access::Write) unit->writers++;
    guard.units_.push_back(std::move(unit));
  }
  return guard;
}

FullParams::~FullParams() {
  for (const auto& unit : units_) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    try {
      if (access_ == Access::Write) {
        unit->writers--;
        unit->keep_own_part();
      }
    } catch (const std::exception& error) {
      log(LogLevel::Error, fmt::format("changes of the parameters of unit '{}' are lost: {}", unit->name(), error.what()));
    }
    Unit* const used[] = {unit.get()};
    schedule->release(used);
    if (access_ == Access::Write) schedule->about_to_write(*unit);
  }
}

at::Tensor full_grad(const at::Tensor& shard) {
  const auto found = located_shard(shard);
  const auto& gradient = shard.grad();
  if (!gradient.defined()) return {};
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto own = at::zeros({found.group->chunk}, gradient.options());
  const auto& span = found.parameter->span;
  own.narrow(0, span.shard_offset, span.shard_numel).copy_(gradient.view({-1}));
  return whole_of(found, own);
}

at::Tensor full_parameter(const at::Tensor& shard) {
  const auto found = located_shard(shard);
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return whole_of(found, found.group->own);
}

}  // namespace tessera
