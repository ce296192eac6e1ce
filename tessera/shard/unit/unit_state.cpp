#include "tessera/shard/unit/unit_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/unit/stored_form.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

std::atomic<int> UnitState::private_ = 0;

void UnitState::unshard(const Fault& fault) {
  if (has_memory()) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto buffers = unit_.buffers();
  expect_equal_start();
  state_ = State::Unsharding;
  try {
    versions.publish(buffers);
    unsharding_ = memory_->unshard(buffers, versions.subject(), fault);
  } catch (...) {
    reshard();
    throw;
  }
  unit_.count_gather();
}

void UnitState::wait_for_unshard() {
  RECORD_USER_SCOPE(fmt::format("tessera::unshard {}", unit_.name()));
  for (const auto& work : unsharding_) work.wait();
  unsharding_.clear();
  memory_->drop_part();
  state_ = State::Unsharded;
}

void UnitState::reshard() {
  const auto early = std::exchange(early_, Early::No);
  if (early == Early::Prefetched || early == Early::AskedFor) unit_.count_cancelled();
  memory_->drop_part();
  if (has_memory()) {
    casts.clear();
    memory_->reshard(unit_.buffers(), std::exchange(unsharding_, {}));
  }
  state_ = State::Sharded;
  if (!std::exchange(is_private_, false)) return;
  private_--;
  read_elsewhere_.clear();
  unit_.shows_stored_ = false;
  for (const auto& group : unit_.groups()) {
    if (converts(group)) show(group, group.unsharded_dtype);
  }
}

void UnitState::reshard_after_forward() {
  const bool keeps = state_ == State::Unsharded && memory_->keep_part(unit_.buffers());
  if (!keeps) return reshard();
  casts.clear();
  memory_->reshard(unit_.buffers(), {});
  state_ = State::PartlyResharded;
}

uint64_t UnitState::held_bytes() const {
  if (has_memory()) return unit_.unsharded_bytes();
  return is_partly_resharded() ? memory_->part_bytes() : 0;
}

void UnitState::expect_own_values() const {
  if (!lent_) return;
  throw UsageError(
      fmt::format("unit '{}' has a moving average in place of its own parameters, so what is written to it now would be lost; write when "
                  "swapped() has ended, or if an exception ended it, after Average::restore()",
                  unit_.name()));
}

bool UnitState::converts(const Unit::Group& group) const {
  return StoredForm::differs(unit_, group);
}

/// Gives the unsharded parameters of a group this dtype. They have no memory then.
void UnitState::show(const Unit::Group& group, at::ScalarType dtype) const {
  const auto unsharded = group.unsharded.lock();
  if (!unsharded) return;
  unsharded->resize(static_cast<size_t>(group.chunk * unit_.mesh().shard().size()) * c10::elementSize(dtype));
  if (dtype == group.dtype && dtype == group.unsharded_dtype) return;
  for (const auto& parameter : group.parameters) {
    const at::Tensor member(parameter.unsharded.lock());
    if (!member.defined()) continue;
    const auto view = paged_view(c10::Storage(unsharded), dtype, member.sizes(), member.strides(), member.storage_offset());
    member.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  }
}

/// Takes the memory of the unsharded parameters away from them without releasing it.
void UnitState::keep_for_others(const Unit::Group& group) {
  const auto unsharded = group.unsharded.lock();
  if (!unsharded) return;
  read_elsewhere_.push_back(unsharded->memory_view(group.unsharded_dtype));
  unsharded->attach(nullptr);
}

void UnitState::show_stored(const Unit::Group& group) const {
  show(group, group.dtype);
  const auto unsharded = group.unsharded.lock();
  if (!unsharded) return;
  unsharded->allocate();
  const Piece piece{.whole = unsharded->memory_view(group.dtype), .own = group.own};
  unit_.mesh().shard().all_gather(std::span(&piece, 1), {.unit = unit_.name(), .number = unit_.number()}).wait();
}

void UnitState::begin_unsharded_writes() {
  expect_own_values();
  if (!std::exchange(is_private_, true)) {
    private_++;
    const c10::AutoGradMode no_grad(false);
    const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
    Unit::Buffers as_stored;
    std::ranges::copy_if(unit_.buffers(), std::back_inserter(as_stored),
                         [&](const Buffer& buffer) { return !converts(unit_.groups()[buffer.number]); });
    memory_->make_private(as_stored);
    unit_.shows_stored_ = true;
    for (const auto& group : unit_.groups()) {
      if (!converts(group)) continue;
      if (unit_.pins_ > 1) keep_for_others(group);
      show_stored(group);
    }
  }
  unsharded_writers_++;
}

void UnitState::keep_own_part() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (const auto& group : unit_.groups()) {
    if (const auto unsharded = group.unsharded.lock()) {
      group.own.copy_(unit_.mesh().shard().own_chunk(flat_view(c10::Storage(unsharded), group.dtype)));
    }
  }
}

void UnitState::make_readable() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  expect_equal_start();
  versions.publish(unit_.buffers());
}

void UnitState::expect_equal_start() {
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto& world = unit_.mesh().world();
  if (start_checked_ || world.traits().traces) {  // in a trace, one process provides the parameters of all ranks
    if (unit_.has_unset()) unit_.expect_values(fmt::format("the use of unit '{}'", unit_.name()));
    return;
  }
  uint64_t all = 0;
  for (const auto& group : unit_.groups()) all = all * 31 + group.fingerprint;
  const auto own = static_cast<int64_t>(all >> 2);  // not negative, and so that -own can't overflow
  const auto extremes =
      at::tensor({own, -own, int64_t{unit_.has_unset()}, -int64_t{unit_.has_unset()}}, at::kLong).to(world.traits().device);
  world.all_reduce(extremes, {.op = Reduce::Max}, {.unit = unit_.name(), .number = unit_.number()}).wait();
  const auto found = extremes.cpu();
  const bool some_lack = found[2].item<int64_t>() != 0, all_lack = found[3].item<int64_t>() != 0;
  if (some_lack && !all_lack) {
    throw ConfigError(fmt::format(
        "only some ranks have values for all parameters of unit '{}'; shard with {{.start = tessera::Start::FromRank0}} to send "
        "those of rank 0, or load the model on all ranks",
        unit_.name()));
  }
  unit_.expect_values(fmt::format("the use of unit '{}'", unit_.name()));
  if (found[0].item<int64_t>() != -found[1].item<int64_t>()) {
    throw UsageError(
        fmt::format("the ranks brought different parameters for unit '{}'; give them the same seed or file before they make the model, "
                    "or shard with {{.start = tessera::Start::FromRank0}}",
                    unit_.name()));
  }
  start_checked_ = true;
}

}  // namespace tessera
