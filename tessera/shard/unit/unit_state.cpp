#include "tessera/shard/unit/unit_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

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
  is_private_ = false;
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

void UnitState::begin_unsharded_writes() {
  expect_own_values();
  memory_->make_private(unit_.buffers());
  is_private_ = true;
  unsharded_writers_++;
}

void UnitState::keep_own_part() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (const auto& group : unit_.groups()) {
    const auto unsharded = group.unsharded.lock();
    if (!unsharded) continue;
    const auto computed = unit_.mesh().shard().own_chunk(flat_view(c10::Storage(unsharded), group.unsharded_dtype));
    const auto& codec = unit_.codec();
    const bool as_stored = !codec.encodes(group.dtype) && !codec.decodes(group.dtype);
    // If the computed form has lower precision than the stored one, only changed values are copied, so that the others keep their
    // precision.
    group.own.copy_(as_stored ? computed : at::where(computed.eq(decoded(codec, group.own)), group.own, computed.to(group.dtype)));
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
