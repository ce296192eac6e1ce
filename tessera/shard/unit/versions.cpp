#include "tessera/shard/unit/versions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/fingerprint.h"

namespace tessera {

Subject Versions::subject() const {
  return {.unit = unit_.name(), .number = unit_.number(), .version = version_, .writer = writer_};
}

void Versions::done_reading() {
  if (!writable_) turns().done_reading(subject());
}

void Versions::wait_to_write(WriteKind how) {
  // If waiting fails, an optimizer of Tessera can repeat its step. Other operators may belong to a step that has already changed something.
  const bool by_optimizer = is_update(how);
  if (!by_optimizer) write_broke_off_ = true;
  make_writable();
  if (!by_optimizer) write_broke_off_ = false;
  written_ = true;
  if (how != WriteKind::UpdateWithCopies || publishes_later_ || !all_casts_by_optimizers()) must_copy_ = true;
}

/// Whether Tessera's optimizers write all cast copies of the unit along with the shards.
bool Versions::all_casts_by_optimizers() const {
  return std::ranges::none_of(
      unit_.groups(), [&](const Unit::Group& group) { return turns().published_copy(group.number).defined() && !group.optimizers_cast; });
}

void Versions::make_writable() {
  if (writable_) return;
  if (detached_) {
    done_reading();
    publishes_later_ = true;
  } else if (!turns().wait_for_readers(subject())) {
    // All ranks wait to write, so the shards move into private memory for good, and other ranks then read a copy.
    const BelowPaging below;
    for (const auto& group : unit_.groups()) {
      if (turns().keep_copy(group.number, group.own)) unit_.make_chunk_private(group.number);
    }
    detached_ = publishes_later_ = true;
  }
  writable_ = true;
}

void Versions::set_writer(WriteKind how, std::string_view writer) {
  const bool joins = how == WriteKind::Operators && written_;  // operators after an optimizer's write belong to the same version
  if (joins) return;
  writer_ = how == WriteKind::Operators ? "operators other than Tessera's optimizers" : writer;
}

void Versions::skip() {
  done_reading();
  written_ = true;
}

at::Tensor Versions::cast_copy(const at::Tensor& flat) const {
  const auto number = tag_of(flat)->group;
  if (!unit_.groups()[number].optimizers_cast || must_copy_) return {};
  const auto published = turns().published_copy(number);
  return published.defined() ? published.narrow(0, flat.storage_offset(), flat.numel()) : published;
}

void Versions::publish() {
  if (!written_) return;
  const BelowPaging below;
  publish(unit_.buffers());
}

void Versions::publish(std::span<const Buffer> buffers) {
  auto next = subject();
  if (written_) next.version++;
  turns().done_writing(buffers, next, must_copy_);
  unit_.memory().evict(buffers);
  if (written_ && pointed_at_) pointed_at_ = fingerprint_of_shards();
  version_ = next.version;
  written_ = writable_ = must_copy_ = publishes_later_ = false;
  for (const auto& group : unit_.groups()) group.own_storage().watch_raw_writes();
}

uint64_t Versions::fingerprint_of_shards() const {
  uint64_t all = 0;
  for (const auto& group : unit_.groups()) all = all * 31 + fingerprint(group.own);
  return all;
}

void Versions::expect_untouched() {
  if (!pointed_at_ || written_) return;
  const BelowPaging below;
  const auto now = fingerprint_of_shards();
  if (std::exchange(pointed_at_, now) == now) return;
  throw UsageError(
      "shards of unit '{}' were changed through a pointer kept from before they were last read, so the change went unnoticed; "
      "call shard.data_ptr() again before each write, on every rank",
      unit_.name());
}

void Versions::reset() {
  if (!written_) writable_ = publishes_later_ = false;
  turns().reset(subject(), !written_);
}

}  // namespace tessera
