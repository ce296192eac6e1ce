// Node-shared unit memory: the chunks of all ranks of a host lie in one shared mapping in rank order, so the mapping is the unsharded unit.
//
// No rank may write what another still reads, or read what another has not written yet. For every unit, each rank counts which version it
// has published and which version it is done reading, and waits for the counters of the others. A rank that has resharded a unit may read
// it again (in backward, or for a second batch), so it counts as done reading only when it enters its own step.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/stream.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/shard/unit/gradient_slots.h"
#include "tessera/shard/unit/unit_memory.h"

namespace tessera {
namespace {

enum VersionCounters { kPublished, kDone, kVersionCounters };

/// Memory of a shared area, from `begin` on, that keeps the area alive.
MemoryPtr memory_of(const SharedArea& area, std::byte* begin) {
  auto keeper = std::make_unique<std::shared_ptr<std::byte>>(area.data());
  return std::make_shared<at::DataPtr>(
      begin, keeper.release(), [](void* kept) { delete static_cast<std::shared_ptr<std::byte>*>(kept); }, at::kCPU);
}

/// Work that is done when all ranks have published a version. A unit waits for one version at a time, so it can use the object again.
struct Publication final : Work::State {
  Publication(std::shared_ptr<SharedArea> control, std::chrono::milliseconds limit) : control(std::move(control)), limit(limit) {}

  void await(uint32_t wanted, const Subject& subject) {
    value = wanted;
    unit = subject.unit;
    version = subject.version;
  }

  void wait() override {
    control->wait(kPublished, value, limit, [&] { return fmt::format("reading version {} of unit '{}'", version, unit); });
  }
  bool done() const override { return control->reached_by_all(kPublished, value); }

  const std::shared_ptr<SharedArea> control;
  const std::chrono::milliseconds limit;
  uint32_t value = 0;
  std::string unit;
  uint64_t version = 0;
};

class NodeSharedMemory final : public UnitMemory {
 public:
  NodeSharedMemory(Communicator shard, std::shared_ptr<SharedArea> control)
      : shard_(std::move(shard)),
        control_(std::move(control)),
        publication_(std::make_shared<Publication>(control_, shard_.limit())),
        slots_(GradientSlots::of(shard_)) {}

  std::string_view name() const override { return "node-shared"; }

  MemoryPtr add(const BufferPlan& plan) override {
    const auto sent = plan.codec->sent(plan.dtype, plan.chunk);
    const auto bytes = static_cast<size_t>(sent.numel) * c10::elementSize(sent.dtype);
    const auto attempt = shard_.share({.bytes_per_rank = bytes}, {.unit = "parameters"});
    if (!attempt.area) {
      throw IoError(fmt::format("no shared memory for a unit of {} bytes: {}; shard with .residence = tessera::Residence::Gathered",
                                bytes * static_cast<size_t>(shard_.size()), attempt.why_not));
    }
    const auto& area = *attempt.area;
    const bool encodes = plan.codec->encodes(plan.dtype);
    const auto own = at::TensorOptions().dtype(sent.dtype);
    places_.push_back({.area = attempt.area,
                       .all = memory_of(area, area.part(0)),
                       .copy = encodes ? at::from_blob(area.part(area.rank()), {sent.numel}, own) : at::Tensor()});
    if (plan.trained) trained_bytes_ += bytes * static_cast<size_t>(shard_.size());
    slots_->reserve(trained_bytes_);
    if (!encodes) return memory_of(area, area.part(area.rank()));
    return allocate_memory(static_cast<size_t>(plan.chunk) * c10::elementSize(plan.dtype), plan.device);
  }

  // The mapping exists in every state, so unsharding takes no further memory.
  uint64_t unsharded_bytes(std::span<const Buffer> /*buffers*/) const override { return 0; }

  uint64_t gathered_bytes(std::span<const Buffer> /*buffers*/) const override { return 0; }

  Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& /*fault*/) override {
    control_->expect_in_step();
    for (const auto& buffer : buffers) buffer.unsharded->attach(places_[buffer.number].all);
    const auto value = after(subject);
    if (control_->reached_by_all(kPublished, value)) return {};
    publication_->await(value, subject);
    return {Work(publication_)};
  }

  // Every rank of the host reads the same copy, so there is nothing to keep.
  void divide_after_forward(int /*ranks*/) override {}
  bool keep_part(std::span<const Buffer> /*buffers*/) override { return false; }
  void drop_part() override {}
  uint64_t part_bytes() const override { return 0; }

  // There is no need to wait for `unsharding`, because it moves no data.
  void reshard(std::span<const Buffer> buffers, Works /*unsharding*/) override {
    for (const auto& buffer : buffers) buffer.unsharded->release();
  }

  void make_private(std::span<const Buffer> buffers) override {
    for (const auto& buffer : buffers) {
      if (buffer.unsharded->owns_memory()) continue;
      const auto shared = buffer.unsharded->memory_view(buffer.unsharded_dtype());
      buffer.unsharded->allocate();
      buffer.unsharded->memory_view(buffer.unsharded_dtype()).copy_(shared);
    }
  }

  void done_reading(const Subject& subject) override { control_->reach(kDone, after(subject)); }

  bool wait_for_readers(const Subject& subject) override {
    control_->expect_in_step();
    done_reading(subject);
    return control_->wait_or_give_way(kDone, after(subject), shard_.limit(), [&] { return still_read(subject); });
  }

  bool keep_copy(const Buffer& buffer) override {
    auto& place = places_[buffer.number];
    if (place.copy.defined()) return false;
    const auto& area = *place.area;
    place.copy = at::from_blob(area.part(area.rank()), {buffer.own.numel()}, buffer.own.options());
    return true;
  }

  void publish(std::span<const Buffer> buffers, const Subject& subject, bool make_copy) override {
    const auto value = after(subject);
    if (value == published_) return;
    if (make_copy) {
      // Returns at once in nearly all cases, because the write has already waited for this.
      Subject before = subject;
      before.version--;
      control_->expect_in_step();
      if (published_ != 0) control_->wait(kDone, after(before), shard_.limit(), [&] { return still_read(before); });
      for (const auto& buffer : buffers) {
        if (auto copy = published_copy(buffer.number); copy.defined()) buffer.codec->encode(buffer.own, copy);
      }
    }
    control_->reach(kPublished, value);
    published_ = value;
  }

  void start_anew(const Subject& subject, bool again) override {
    if (again) control_->reach(kDone, after(subject) - 1);
    control_->back_in_step();
    slots_->start_anew();
  }

  at::Tensor published_copy(size_t buffer) const override { return places_[buffer].copy; }

  bool packs_after_sum() const override { return slots_->packs_after_sum(); }

  GradientBuffers gradient_buffers(std::span<const GradientPlan> plans) override { return slots_->buffers(plans, shard_.limit()); }

  // Large gradients are written past the caches, because the rank that reads them may not share a cache with this one.
  void pack(const at::Tensor& place, const at::Tensor& gradient) const override {
    constexpr int64_t kLarge = int64_t{1} << 20, kGrain = int64_t{1} << 18;  // bytes
    const auto bytes = static_cast<int64_t>(place.nbytes());
    if (bytes < kLarge || gradient.scalar_type() != place.scalar_type() || gradient.strides() != place.strides()) {
      place.copy_(gradient);
      return;
    }
    auto* const target = static_cast<std::byte*>(place.data_ptr());
    const auto* const source = static_cast<const std::byte*>(gradient.const_data_ptr());
    at::parallel_for(0, bytes, kGrain,
                     [&](int64_t begin, int64_t end) { detail::stream(target + begin, source + begin, static_cast<size_t>(end - begin)); });
  }

  Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op) override {
    return {slots_->reduce(turn_, pieces, subject, shard_.limit(), op)};
  }

  Works reduce(std::span<const Piece> pieces, const Subject& subject, TakeMean take) override {
    return {slots_->reduce(turn_, pieces, subject, shard_.limit(), Reduce::Mean, std::move(take))};
  }

 private:
  struct Place {
    std::shared_ptr<SharedArea> area;
    MemoryPtr all;    // the chunks of all ranks
    at::Tensor copy;  // what other ranks read, if this rank's own chunk lies in private memory; else undefined
  };

  static std::string still_read(const Subject& subject) {
    return fmt::format(
        "writing shards of unit '{}', which ranks may still read in version {} until they take their own step or call tessera::skip_step",
        subject.unit, subject.version);
  }

  /// The counter value for a version. It is one more than the version, because counters start at 0 and so do versions.
  static uint32_t after(const Subject& subject) { return static_cast<uint32_t>(subject.version) + 1; }

  Communicator shard_;
  std::shared_ptr<SharedArea> control_;
  std::shared_ptr<Publication> publication_;
  const std::shared_ptr<GradientSlots> slots_;
  const std::shared_ptr<GradientSlots::Turn> turn_ = GradientSlots::make_turn();  // a unit has one reduction at a time
  size_t trained_bytes_ = 0;
  std::vector<Place> places_;
  uint32_t published_ = 0;
};

}  // namespace

std::unique_ptr<UnitMemory> node_shared_memory(Communicator shard, std::string& why_not) {
  auto attempt = shard.share({.bytes_per_rank = 0, .counters = kVersionCounters}, {.unit = "version counters"});
  why_not = attempt.why_not;
  if (!attempt.area) return nullptr;
  return std::make_unique<NodeSharedMemory>(std::move(shard), std::move(attempt.area));
}

}  // namespace tessera
