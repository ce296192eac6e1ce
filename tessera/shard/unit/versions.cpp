#include "tessera/shard/unit/versions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

Subject Versions::subject() const {
  return {.unit = unit_.name(), .number = unit_.number(), .version = version_, .writer = writer_};
}

void Versions::done_reading() {
  if (!writable_) memory_.done_reading(subject());
}

void Versions::wait_to_write(WriteKind how) {
  // If waiting fails, one of our optimizers can repeat its step. Other operators may belong to a step that has already changed something.
  const bool by_optimizer = is_update(how);
  if (!by_optimizer) write_broke_off_ = true;
  make_writable();
  if (!by_optimizer) write_broke_off_ = false;
  written_ = true;
  if (how != WriteKind::UpdateWithCopies || late_ || !all_casts_by_optimizers()) must_copy_ = true;
}

/// Whether our optimizers write all cast copies of the unit along with the shards.
bool Versions::all_casts_by_optimizers() const {
  for (size_t i = 0; i < unit_.groups().size(); i++) {
    if (memory_.published_copy(i).defined() && !unit_.groups()[i].optimizers_cast) return false;
  }
  return true;
}

void Versions::make_writable() {
  if (writable_) return;
  if (detached_) {
    done_reading();
    late_ = true;
  } else if (!memory_.wait_for_readers(subject())) {
    detach();
    late_ = true;
  }
  writable_ = true;
}

void Versions::set_writer(WriteKind how, std::string_view writer) {
  const bool joins = how == WriteKind::Operators && written_;  // what an optimizer has written is written on by other operators
  if (joins) return;
  writer_ = how == WriteKind::Operators ? "operators other than Tessera's optimizers" : writer;
}

void Versions::skip() {
  done_reading();
  written_ = true;
}

/// Moves the shards into private memory for good. Other ranks read a copy from now on.
void Versions::detach() {
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (size_t i = 0; i < unit_.groups().size(); i++) {
    auto& group = unit_.groups_[i];
    if (!memory_.keep_copy({.number = i, .unsharded = {}, .own = group.own, .codec = &unit_.codec()})) continue;
    auto& storage = group.own_storage();
    auto memory = allocate_memory(storage.nbytes(), storage.device());
    const auto before = std::exchange(group.own, {});
    storage.attach(std::move(memory));
    group.own = storage.memory_view(group.dtype).copy_(before);
  }
  detached_ = true;
}

at::Tensor Versions::cast_copy(const at::Tensor& flat) const {
  const auto number = tag_of(flat)->group;
  const auto published = unit_.groups()[number].optimizers_cast && !must_copy_ ? memory_.published_copy(number) : at::Tensor();
  return published.defined() ? published.narrow(0, flat.storage_offset(), flat.numel()) : published;
}

void Versions::publish() {
  if (!written_) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  publish(unit_.buffers());
}

void Versions::publish(std::span<const Buffer> buffers) {
  auto next = subject();
  if (written_) next.version++;
  memory_.publish(buffers, next, must_copy_);
  if (written_ && pointed_at_) pointed_at_ = fingerprint_of_shards();
  version_ = next.version;
  written_ = writable_ = must_copy_ = late_ = false;
  for (const auto& group : unit_.groups()) group.own_storage().watch_raw_writes();
}

uint64_t Versions::fingerprint_of_shards() const {
  uint64_t all = 0;
  for (const auto& group : unit_.groups()) all = all * 31 + fingerprint(group.own);
  return all;
}

void Versions::expect_untouched() {
  if (!pointed_at_ || written_) return;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto now = fingerprint_of_shards();
  if (std::exchange(pointed_at_, now) == now) return;
  throw UsageError(fmt::format(
      "shards of unit '{}' were changed through a pointer that was kept from before they were read last, which nobody could see; "
      "ask for shard.data_ptr() anew before each time that you write, on every rank",
      unit_.name()));
}

void Versions::start_anew() {
  if (!written_) writable_ = late_ = false;
  memory_.start_anew(subject(), !written_);
}

}  // namespace tessera
