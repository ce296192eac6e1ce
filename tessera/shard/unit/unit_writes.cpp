// How the shards of a unit change, and how other ranks come to see it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

void Unit::about_to_write() {
  write_broke_off_ = true;
  wait_to_write();
  write_broke_off_ = false;
  written_ = stale_ = true;
}

void Unit::wait_to_write() {
  if (writable_) return;
  if (detached_) {
    memory_->done_reading(subject());
    late_ = true;
  } else if (!memory_->write(subject())) {
    detach();
    late_ = true;
  }
  writable_ = true;
}

void Unit::about_to_update() {
  wait_to_write();
  written_ = true;
  for (size_t i = 0; i < groups_.size(); i++) {
    if (late_ || (memory_->published(i).defined() && !groups_[i].optimizers_cast())) stale_ = true;
  }
}

void Unit::skip_update() {
  memory_->done_reading(subject());
  written_ = true;
}

void Unit::detach() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (size_t i = 0; i < groups_.size(); i++) {
    auto& group = groups_[i];
    auto& storage = group.own_storage();
    if (!memory_->keep_copy({.number = i, .unsharded = {}, .unsharded_dtype = group.unsharded_dtype, .own = group.own})) continue;
    auto memory = allocate(storage.nbytes(), storage.device());
    const auto before = std::exchange(group.own, {});
    lend(storage, std::move(memory));
    group.own = memory_view(storage, group.dtype).copy_(before);
  }
  detached_ = true;
}

void Unit::hand_out_pointer() {
  pointed_at_ = own_fingerprint();
}

uint64_t Unit::own_fingerprint() const {
  uint64_t all = 0;
  for (const auto& group : groups_) all = all * 31 + fingerprint(group.own);
  return all;
}

void Unit::expect_untouched() {
  if (!pointed_at_ || written_) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  if (own_fingerprint() == *pointed_at_) return;
  pointed_at_ = own_fingerprint();
  throw UsageError(fmt::format(
      "shards of unit '{}' were changed through a pointer that was kept from before they were read last, which nobody could see; "
      "ask for shard.data_ptr() anew before each time that you write, on every rank",
      name_));
}

at::Tensor Unit::cast_copy(const at::Tensor& flat) {
  const auto number = tag_of(flat)->group;
  const auto published = groups_[number].optimizers_cast() && !late_ ? memory_->published(number) : at::Tensor();
  return published.defined() ? published.narrow(0, flat.storage_offset(), flat.numel()) : published;
}

void Unit::outdate(const at::Tensor& written) {
  const auto outdate_one = [](const Parameter& parameter) {
    if (const auto unsharded = parameter.unsharded.lock()) unsharded->bump_version();
  };
  const auto outdate_all = [&](const Group& group) { std::ranges::for_each(group.parameters, outdate_one); };
  if (!written.defined()) return std::ranges::for_each(groups_, outdate_all), void();
  auto& group = groups_[tag_of(written)->group];
  if (group.flat) return outdate_all(group);
  if (written.numel() == 0) {  // here, but not on other ranks
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

void Unit::publish() {
  if (!written_) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  publish(buffers());
}

void Unit::start_anew() {
  const auto held = schedule_->lock();
  abandon_reduction();
  if (!written_) writable_ = late_ = false;
  memory_->start_anew(subject(), !written_);
  for (auto& group : groups_) {
    for (auto& parameter : group.parameters) parameter.shard.mutable_grad() = at::Tensor();
  }
}

void Unit::publish(std::span<const Buffer> buffers) {
  // Once for all writes since the last time: how many operators an optimizer takes may depend on the rank's part.
  auto next = subject();
  if (written_) next.version++;
  memory_->publish(buffers, next, stale_);
  if (written_ && pointed_at_) pointed_at_ = own_fingerprint();
  version_ = next.version;
  written_ = writable_ = stale_ = late_ = false;
  for (const auto& group : groups_) watch(group.own_storage());
}

void Unit::keep_own_part() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& group : groups_) {
    const auto unsharded = group.unsharded.lock();
    if (!unsharded) continue;
    const auto now = options_.mesh.shard().own_chunk(flat_view(c10::Storage(unsharded), group.unsharded_dtype));
    // Where the whole is narrower than the shards, only what was changed goes back: the rest would lose its last digits.
    group.own.copy_(group.unsharded_dtype == group.dtype ? now
                                                    : at::where(now.eq(group.own.to(group.unsharded_dtype)), group.own, now.to(group.dtype)));
  }
}

}  // namespace tessera
