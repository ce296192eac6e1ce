#include "tessera/shard/memory/gradient_slots.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/control/fill_envelope.h"
#include "tessera/comm/groups/per_group.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

constexpr size_t kSlotAlignment = 64;
enum SlotCounters { kPacked, kAdded, kSlotCounters };

constexpr size_t aligned(size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

constexpr uint32_t slots_of(size_t bytes) {
  return bytes > GradientSlots::kLargeSlot ? 1 : 2;
}

constexpr size_t kSpareBytes = 1024;  // room in each slot for padding between buffers
/// The beginning of a slot, by which ranks notice that they have packed gradients of different reductions. They read envelopes only if the
/// digests differ.
struct Head {
  Head(const Envelope& envelope, uint64_t evaluations) : digest(envelope.digest()), evaluations(evaluations), envelope(envelope) {}

  Digest digest;
  uint64_t evaluations;  // see note_evaluations()
  Envelope envelope;
};
constexpr size_t kHead = aligned(sizeof(Head));

const Head& head_of(const std::byte* slot) {
  return *reinterpret_cast<const Head*>(slot);
}

at::Tensor view(std::byte* memory, int64_t numel, at::ScalarType dtype) {
  return at::from_blob(memory, {numel}, at::TensorOptions().dtype(dtype));
}

}  // namespace

/// One reduction. The thread that waits for it adds up the gradients.
struct GradientSlots::Turn final : Work::State {
  void wait() override {
    if (!is_done) {
      const std::lock_guard lock(slots->mutex_);
      slots->finish_through(number, this);
    }
    if (error) std::rethrow_exception(error);
    // If another turn needed the slot before this thread waited, the mean is complete, but not taken yet.
    if (const auto own_take = std::exchange(take, {})) give_mean(std::exchange(pieces, {}), own_take);
  }
  bool done() const override { return is_done; }

  GradientSlots* slots = nullptr;  // not owned, because the UnitMemory that holds this work owns the slots
  uint32_t number = 0;
  std::chrono::milliseconds limit{};
  c10::SmallVector<Piece, 2> pieces;
  Reduce op = Reduce::Mean;
  TakeMean take;
  std::exception_ptr error;
  std::atomic<bool> is_done = false;
};

std::shared_ptr<GradientSlots> GradientSlots::of(const Communicator& group) {
  static PerGroup<GradientSlots> all;
  return all.get(group, [&] { return std::make_shared<GradientSlots>(group); });
}

std::shared_ptr<GradientSlots::Turn> GradientSlots::make_turn() {
  return std::make_shared<Turn>();
}

void GradientSlots::reserve(size_t bytes) {
  const std::lock_guard lock(mutex_);
  announced_ = std::max(announced_, aligned(kHead + bytes + kSpareBytes));  // aligned, because the second slot begins right after the first
  expected_ = std::max(expected_, announced_);
}

std::byte* GradientSlots::slot(int rank, uint32_t turn) const {
  return area_->part(rank) + (turn % slots_of(size_)) * size_;
}

bool GradientSlots::packs_after_sum() {
  const std::lock_guard lock(mutex_);
  return slots_of(expected_) == 1;
}

void GradientSlots::reset() {
  const std::lock_guard lock(mutex_);
  for (const auto& turn : open_) {
    turn->error = std::make_exception_ptr(CommError("the sum of gradients was abandoned by tessera::recover; run the pass again"));
    turn->pieces.clear();
    turn->take = {};
    turn->is_done = true;
  }
  open_.clear();
  area_.reset();
  size_ = 0;
  expected_ = announced_;  // ranks may have asked for different buffers since
}

void GradientSlots::make_area(std::chrono::milliseconds limit) {
  if (area_) finish_through(turn_);
  area_.reset();
  size_ = 0;
  const auto bytes = slots_of(expected_) * expected_;
  auto attempt = group_.with_limit(limit).share({.bytes_per_rank = bytes, .counters = kSlotCounters}, {.unit = kGradientMemory});
  if (!attempt.area) {
    throw IoError(
        "no shared memory for gradients, {} bytes per rank: {}; shard smaller units, or with .residence = "
        "tessera::Residence::Gathered",
        bytes, attempt.why_not);
  }
  area_ = std::move(attempt.area);
  size_ = expected_;
  turn_ = 0;
}

GradientBuffers GradientSlots::buffers(std::span<const GradientPlan> plans, std::chrono::milliseconds limit) {
  GradientBuffers result{.buffers = {}, .reservation = std::unique_lock(packing_)};
  const std::lock_guard lock(mutex_);
  size_t bytes = kHead;
  for (const auto& plan : plans) bytes += aligned(static_cast<size_t>(plan.numel) * c10::elementSize(plan.dtype));
  expected_ = std::max(expected_, bytes);  // `bytes` may be more than was announced, if parameters have been thawed since
  if (area_) area_->expect_in_step();
  if (expected_ > size_) make_area(limit);
  const auto turn = turn_ + 1;
  const auto before = turn - slots_of(size_);  // the last turn in the same slot
  finish_through(before);
  area_->wait(kAdded, before, limit, [] { return std::string("waiting for a free slot of gradients"); });
  if (auto* const simulation = Simulation::current()) {  // a slot takes memory as far as it was written
    auto& written = written_[turn % written_.size()];
    const MemoryScope scope(MemoryKind::Reduction);
    simulation->note_memory(std::max(bytes, written) - written);
    written = std::max(bytes, written);
  }
  auto* place = slot(area_->rank(), turn) + kHead;
  for (const auto& plan : plans) {
    result.buffers.push_back(view(place, plan.numel, plan.dtype));
    place += aligned(result.buffers.back().nbytes());
  }
  return result;
}

Work GradientSlots::reduce(std::shared_ptr<Turn> turn, std::span<const Piece> pieces, const Subject& subject,
                           std::chrono::milliseconds limit, Reduce op, TakeMean take) {
  const std::lock_guard lock(mutex_);
  turn->slots = this;
  turn->limit = limit;
  turn->number = turn_ + 1;
  turn->error = nullptr;
  turn->is_done = false;
  turn->pieces.assign(pieces.begin(), pieces.end());
  turn->op = op;
  turn->take = std::move(take);
  const auto fill = [&](Envelope& envelope) {
    describe(envelope, pieces, group_.traits());
    if (!pieces.empty()) describe(envelope, resolved({.op = op}, pieces.front().whole));
  };
  new (slot(area_->rank(), turn->number)) Head(envelope_for(Operation::ReduceScatter, subject, fill), evaluations_);
  uint64_t bytes = 0;  // how much of this rank's gradients the other ranks read
  for (const auto& piece : pieces) bytes += piece.whole.nbytes() - piece.whole.nbytes() / static_cast<size_t>(area_->size());
  group_.count(Operation::ReduceScatter, bytes);
  turn_++;
  area_->reach(kPacked, turn_);
  open_.push_back(turn);
  return Work(std::move(turn));
}

void GradientSlots::finish_through(uint32_t turn, const Turn* awaited) {
  while (!open_.empty() && static_cast<int32_t>(turn - open_.front()->number) >= 0) {
    const auto next = std::move(open_.front());
    open_.erase(open_.begin());
    try {
      add_up(*next, next.get() == awaited);
    } catch (...) {
      next->error = std::current_exception();
      next->take = {};
    }
    area_->reach(kAdded, next->number);
    if (!next->take) next->pieces.clear();
    next->is_done = true;
  }
}

void GradientSlots::compare_evaluations(uint32_t turn) {
  std::vector<int> with_more;
  uint64_t least = head_of(slot(0, turn)).evaluations;
  for (int rank = 0; rank < area_->size(); rank++) least = std::min(least, head_of(slot(rank, turn)).evaluations);
  for (int rank = 0; rank < area_->size(); rank++) {
    if (head_of(slot(rank, turn)).evaluations > least) with_more.push_back(group_.world_rank(rank));
  }
  if (with_more.empty()) return;
  compares_evaluations_ = false;
  if (group_.world_rank(area_->rank()) != with_more.front()) return;
  log(LogLevel::Warning,
      fmt::format("{} evaluated the model without the other ranks, which works only because they share its parameters in memory: between hosts and "
                  "on devices it is an error, so evaluate on all ranks",
                  name_ranks(with_more)));
}

void GradientSlots::add_up(Turn& turn, bool awaited) {
  if (auto* const simulation = Simulation::current()) {
    uint64_t bytes = 0;
    for (const auto& piece : turn.pieces) bytes += piece.whole.nbytes();
    simulation->pass_over(bytes);
    if (turn.take) std::exchange(turn.take, {})([](size_t, int64_t, const at::Tensor&) {});
    return;
  }
  area_->expect_in_step();
  area_->wait(kPacked, turn.number, turn.limit, [&] { return head_of(slot(area_->rank(), turn.number)).envelope.describe(); });
  area_->expect_in_step();
  Digest digest;
  for (int rank = 0; rank < area_->size(); rank++) digest.add(head_of(slot(rank, turn.number)).digest);
  if (!digest.agrees()) {
    std::vector<Envelope> envelopes;
    for (int rank = 0; rank < area_->size(); rank++) envelopes.push_back(head_of(slot(rank, turn.number)).envelope);
    expect_agreement(envelopes, group_.traits().world_ranks, area_->callers());
  }
  if (compares_evaluations_) compare_evaluations(turn.number);
  if (turn.take && awaited) {
    return std::exchange(turn.take, {})(
        [&](size_t piece, int64_t begin, const at::Tensor& target) { add_up(turn, turn.pieces[piece].whole, begin, target); });
  }
  for (auto& piece : turn.pieces) {
    if (turn.take) piece.own = at::empty_like(piece.own, piece.own.options().dtype(at::promoteTypes(piece.own.scalar_type(), at::kFloat)));
    if (piece.squares) *piece.squares = 0;
    add_up(turn, piece.whole, 0, piece.own, piece.squares.get());
  }
}

/// Adds up values of this rank's part, from `begin` on.
void GradientSlots::add_up(const Turn& turn, const at::Tensor& whole, int64_t begin, const at::Tensor& target, double* squares) {
  if (target.numel() == 0) return;  // an empty buffer may have no address
  const c10::InferenceMode inference;
  const auto own_rank = area_->rank();
  const auto width = static_cast<int64_t>(whole.element_size());
  const auto first = own_rank * (whole.numel() / area_->size()) + begin;
  const auto offset =
      static_cast<std::byte*>(whole.data_ptr()) - slot(own_rank, turn.number) + first * width;
  contributions_.clear();
  for (int rank = 0; rank < area_->size(); rank++) {
    contributions_.emplace_back(slot(rank, turn.number) + offset, static_cast<size_t>(target.numel() * width));
  }
  Reducer(resolved({.op = turn.op}, whole)).reduce(contributions_, target, group_.topology(), squares);
}

}  // namespace tessera
