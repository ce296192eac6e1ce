#include "tessera/shard/schedule/unit_state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/base/words.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/comm/recorded.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera {

std::atomic<int> UnitState::showing_stored_ = 0;

at::Tensor Casts::cast(const at::Tensor& operand, at::ScalarType dtype) {
  // Only results of operators are remembered. A program may refill an input through a raw pointer, which does not change its version.
  if (!c10::GradMode::is_enabled() || !operand.requires_grad() || operand.is_leaf()) return operand.to(dtype);
  std::erase_if(known_, [](const Cast& known) { return known.operand.expired() || known.result.expired(); });
  const auto version = static_cast<uint32_t>(operand._version());
  for (const auto& known : known_) {
    if (!known.operand.lock().is_same(operand) || known.version != version) continue;
    const auto result = known.result.lock();
    if (result.defined() && result.scalar_type() == dtype) return result;
  }
  auto result = operand.to(dtype);
  known_.push_back({.operand = WeakTensor(operand), .version = version, .result = WeakTensor(result)});
  return result;
}

void UnitState::unshard(std::span<at::Tensor> operands) {
  if (has_memory()) return;
  const BelowPaging below;
  const auto buffers = unit_.buffers();
  auto& memory = unit_.memory();
  expect_equal_start();
  const bool is_kept = is_partly_resharded();
  state_ = State::Unsharding;
  held_bytes_ = memory.unsharded_bytes(buffers);
  try {
    versions.publish(buffers);
    unsharding_ = is_kept ? kept_->fill(buffers, versions.subject(), operands) : memory.chunks->fill(buffers, versions.subject(), operands);
    published_ = memory.turns->wait_for_writers(versions.subject());
  } catch (...) {
    reshard();
    throw;
  }
  auto& counters = unit_.counters();
  counters.gathers++;
  counters.gathered_bytes += is_kept ? kept_->gathered_bytes() : memory.gathered_bytes(buffers, unit_.mesh().shard().size());
}

void UnitState::wait_for_unshard() {
  const Recorded wait(unit_.mesh().world().record().get(), Activity::Unshard, "unshard", unit_.name());
  for (const auto& work : unsharding_) work.wait();
  unsharding_.clear();
  std::exchange(published_, {}).wait();
  if (kept_) kept_->drop();
  if (state_ != State::Unsharded) whole_ = Event::later(unit_.device());
  state_ = State::Unsharded;
  note_stream();
}

void UnitState::note_stream() {
  if (unit_.device().is_cpu()) return;
  const auto now = Event::later(unit_.device());
  if (whole_.is_on_stream_of(now)) return;
  whole_.block();
  if (std::ranges::none_of(streams_, [&](const Event& known) { return known.is_on_stream_of(now); })) streams_.push_back(now);
}

void UnitState::release_memory() {
  casts.clear();
  whole_.block();
  for (const auto& used : std::exchange(streams_, {})) used.block();
  unit_.memory().release(unit_.buffers(), std::exchange(unsharding_, {}));
  published_ = {};
}

void UnitState::reshard() {
  const auto early = std::exchange(early_, Early::No);
  if (early == Early::Prefetched || early == Early::AskedFor) unit_.counters().cancelled++;
  if (kept_) kept_->drop();
  if (has_memory()) release_memory();
  state_ = State::Sharded;
  held_bytes_ = 0;
  if (!unit_.flags().shows_stored.exchange(false)) return;
  showing_stored_--;
  read_elsewhere_.clear();
  for (const auto& group : unit_.groups()) {
    if (group.converts) show(group, group.unsharded_dtype);
  }
}

void UnitState::reshard_after_forward() {
  if (state_ != State::Unsharded || !kept_) return reshard();
  kept_->keep(unit_.buffers());
  release_memory();
  state_ = State::PartlyResharded;
  held_bytes_ = kept_->bytes();
}

void expect_divisor(ReshardAfterForward rule, int all) {
  const int ranks = rule.ranks(all);
  if (ranks >= 1 && all % ranks == 0) return;
  throw UsageError(
      "reshard_after_forward = {}: a shard group of {} ranks can't be divided into groups of {}; give a divisor of {}, true or "
      "false",
      ranks, all, ranks, all);
}

void UnitState::set_reshard_after_forward(ReshardAfterForward rule) {
  if (is_partly_resharded()) throw std::logic_error("the rule of a unit that is partly resharded can't be changed");
  const auto& shard = unit_.mesh().shard();
  expect_divisor(rule, shard.size());
  if (!rule.keeps(/*is_root=*/false)) {
    kept_.reset();
    // If unsharding makes no copy (as when the ranks of a host share memory), there is nothing to keep.
    if (const int ranks = rule.ranks(shard.size()); ranks != shard.size() && unit_.memory().copies(unit_.buffers()))
      kept_.emplace(shard, ranks);
  }
  settings.reshard_after_forward = rule;
}

void UnitState::expect_own_values() const {
  if (!is_swapped) return;
  throw UsageError(
      "unit '{}' has a moving average in place of its own parameters, so a write now would be lost; write after the guard of "
      "Average::swapped() has ended or, if an exception ended it, after Average::restore()",
      unit_.name());
}

void UnitState::gather(const at::Tensor& own, const at::Tensor& whole) const {
  const Piece piece{.whole = whole, .own = own};
  unit_.mesh().shard().all_gather(std::span(&piece, 1), {.unit = unit_.name(), .number = unit_.number()}).wait();
}

at::Tensor UnitState::gathered(const Unit::Group& group, const at::Tensor& own_flat) {
  expect_equal_start();
  const auto own = own_flat.to(unit_.device());
  auto whole = at::empty({group.chunk * unit_.mesh().shard().size()}, own.options());
  gather(own, whole);
  return whole;
}

/// Gives the unsharded parameters of a group this dtype, and takes their memory away.
void UnitState::show(const Unit::Group& group, at::ScalarType dtype) const {
  const auto unsharded = group.unsharded.lock();
  if (!unsharded) return;
  unsharded->resize(static_cast<size_t>(group.chunk * unit_.mesh().shard().size()) * c10::elementSize(dtype));
  if (dtype == group.dtype && dtype == group.unsharded_dtype) return;
  for (const auto& parameter : group.parameters) {
    const auto member = parameter.unsharded.lock();
    if (!member.defined()) continue;
    const auto view = paged_view(c10::Storage(unsharded), dtype, member.sizes(), member.strides(), member.storage_offset());
    member.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  }
}

/// Takes the memory of the unsharded parameters away from them without freeing it, because pointers to it were handed out.
void UnitState::keep_for_others(const Unit::Group& group) {
  const auto unsharded = group.unsharded.lock();
  if (!unsharded) return;
  read_elsewhere_.push_back(unsharded->memory_view(group.unsharded_dtype));
  unsharded->attach(nullptr);
}

void UnitState::show_stored() {
  auto& shows_stored = unit_.flags().shows_stored;
  if (shows_stored) return;
  const BelowPaging below;
  // Everything that can fail comes before the first parameter changes, because other guards of full_params may already use the unit.
  const auto& shard = unit_.mesh().shard();
  std::vector<std::pair<const Unit::Group*, MemoryPtr>> gathered;
  for (const auto& group : unit_.groups()) {
    if (!group.converts) continue;
    const auto numel = group.chunk * shard.size();
    auto memory = allocate_memory(static_cast<size_t>(numel) * c10::elementSize(group.dtype), unit_.device(), unit_.name());
    const auto own = group.own.to(unit_.device());
    gather(own, at::from_blob(memory->get(), {numel}, own.options()));
    gathered.emplace_back(&group, std::move(memory));
  }
  shows_stored = true;
  showing_stored_++;
  for (auto& [group, memory] : gathered) {
    if (unit_.flags().pins > 1) keep_for_others(*group);
    show(*group, group->dtype);
    if (const auto unsharded = group->unsharded.lock()) unsharded->adopt(std::move(memory));
  }
}

void UnitState::begin_unsharded_writes() {
  expect_own_values();
  show_stored();
  const BelowPaging below;
  for (const auto& group : unit_.groups()) {
    const auto unsharded = group.unsharded.lock();
    if (!unsharded || unsharded->owns_memory()) continue;
    const auto shared = unsharded->memory_view(group.dtype);
    unsharded->allocate(unit_.name());
    unsharded->memory_view(group.dtype).copy_(shared);
  }
  unsharded_writers_++;
}

void UnitState::keep_own_part() {
  const BelowPaging below;
  for (const auto& group : unit_.groups()) {
    if (const auto unsharded = group.unsharded.lock()) {
      group.own.copy_(unit_.mesh().shard().own_chunk(flat_view(c10::Storage(unsharded), group.dtype)));
    }
  }
}

void UnitState::make_readable() {
  const BelowPaging below;
  expect_equal_start();
  versions.publish(unit_.buffers());
}

void UnitState::expect_equal_start() {
  const BelowPaging below;
  const auto& world = unit_.mesh().world();
  if (start_checked_ || world.traits().traces) {  // if the engine traces, one process provides the parameters of all ranks
    if (unit_.flags().unset > 0) expect_values(unit_, fmt::format("the use of unit '{}'", unit_.name()));
    return;
  }
  const Subject subject{.unit = unit_.name(), .number = unit_.number()};
  if (!world.extremes(unit_.flags().unset > 0 ? 1 : 0, subject).are_one()) {
    throw ConfigError(
        "only some ranks have values for all parameters of unit '{}'; shard with {{.start = tessera::Start::FromRank0}} to send "
        "those of rank 0, or load the model on all ranks",
        unit_.name());
  }
  expect_values(unit_, fmt::format("the use of unit '{}'", unit_.name()));
  std::string lines;
  for (const auto& group : unit_.groups()) {
    std::vector<std::string> names;
    for (const auto& parameter : group.parameters) names.push_back(parameter.local_name);
    lines += fmt::format("{}\tvalues #{:x}\n", some_of(names), group.fingerprint);
  }
  if (const auto different = difference_on_ranks(world, lines, subject); !different.empty()) {
    if (unit_.options().start == Start::FromRank0) {
      throw DisagreementError("the values that arrived for unit '{}' are not those that rank 0 sent. {}", unit_.name(), different);
    }
    throw UsageError(
        "the ranks brought different parameters for unit '{}'; give them the same seed or file before they make the model, "
        "or shard with {{.start = tessera::Start::FromRank0}}. {}",
        unit_.name(), different);
  }
  start_checked_ = true;
}

}  // namespace tessera
