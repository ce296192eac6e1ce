// Node-shared unit memory: the chunks of all ranks lie in a mapping that the ranks of a host share, in rank order, so the mapping is the
// unsharded unit. If the ranks are on several hosts, each host has such a mapping, and fetches the chunks of other hosts once for each
// version.
//
// No rank may write a chunk that another rank still reads, or read a chunk before its owner has written it. For every unit, each rank
// counts which version it has published and which version it is done reading, and waits for the counters of the other ranks. A rank that
// has resharded a unit may read it again (in backward, or for a second batch), so it counts as done reading only when it enters its own
// step. The counters are those of the ranks of one host: what is fetched is written only when all ranks have come to read the new version.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/stream.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/memory/gradient_slots.h"
#include "tessera/shard/memory/unit_memory.h"

namespace tessera {
namespace {

enum VersionCounters { kPublished, kDone, kVersionCounters };

/// Returns the memory of a shared area from `begin` on, which keeps the area alive.
MemoryPtr memory_of(const SharedArea& area, std::byte* begin) {
  auto keeper = std::make_unique<std::shared_ptr<std::byte>>(area.data());
  return std::make_shared<at::DataPtr>(
      begin, keeper.release(), [](void* kept) { delete static_cast<std::shared_ptr<std::byte>*>(kept); }, at::kCPU);
}

/// The shared memory of a unit.
struct Shared {
  struct Place {
    MemoryPtr all;    // the chunks of all ranks
    std::byte* own;   // this rank's chunk
    at::Tensor copy;  // the copy that other ranks read if this rank's own chunk is in private memory; else undefined
  };

  const Communicator shard;
  const std::shared_ptr<SharedArea> control;   // holds the version counters of the ranks of this host
  const std::shared_ptr<GradientSlots> slots;  // null if the ranks are on several hosts
  std::vector<Place> places = {};              // one place for each buffer
  uint32_t fetched = 0;                        // the counter value of the version that lies in the memory of all hosts

  bool has_one_host() const { return slots != nullptr; }
};
using SharedPtr = std::shared_ptr<Shared>;

/// The counter value for a version. It is one more than the version, because counters start at 0 and so do versions.
uint32_t after(const Subject& subject) {
  return static_cast<uint32_t>(subject.version) + 1;
}

/// Notes that a version has been fetched from the other hosts.
struct Fetch final : Work::State {
  Fetch(SharedPtr shared, Works gathers, uint32_t version) : shared(std::move(shared)), gathers(std::move(gathers)), version(version) {}

  void wait() override {
    for (const auto& work : gathers) work.wait();
    shared->fetched = version;
  }
  bool done() const override { return shared->fetched == version; }

  const SharedPtr shared;
  const Works gathers;
  const uint32_t version;
};

class SharedChunks final : public Chunks {
 public:
  explicit SharedChunks(SharedPtr shared) : shared_(std::move(shared)) {
    const auto& topology = shared_->shard.topology();
    const int own = shared_->shard.rank(), host = topology.host_of(own);
    for (int rank = 0; rank < topology.ranks(); rank++) {
      if (topology.host_of(rank) != host && topology.partner(rank, host) == own) senders_++;
    }
  }

  MemoryPtr add(const BufferPlan& plan) override {
    const auto sent = plan.codec->sent(plan.dtype, plan.chunk);
    const auto bytes = static_cast<size_t>(sent.numel) * c10::elementSize(sent.dtype);
    const auto ranks = static_cast<size_t>(shared_->shard.size());
    const auto attempt = shared_->shard.share({.bytes_per_rank = bytes, .among = Among::Host}, {.unit = "parameters"});
    if (!attempt.area) {
      throw IoError("no shared memory for a unit of {} bytes: {}; shard with .residence = tessera::Residence::Gathered", bytes * ranks,
                    attempt.why_not);
    }
    const auto& area = *attempt.area;
    const bool encodes = plan.codec->encodes(plan.dtype);
    auto* const own = area.part(0) + static_cast<size_t>(shared_->shard.rank()) * bytes;
    shared_->places.push_back({.all = memory_of(area, area.part(0)),
                               .own = own,
                               .copy = encodes ? at::from_blob(own, {sent.numel}, at::TensorOptions(sent.dtype)) : at::Tensor()});
    if (plan.trained) trained_bytes_ += bytes * ranks;
    if (shared_->has_one_host()) shared_->slots->reserve(trained_bytes_);
    if (!encodes) return memory_of(area, own);
    return allocate_memory(static_cast<size_t>(plan.chunk) * c10::elementSize(plan.dtype), plan.device, plan.unit);
  }

  Works fill(std::span<const Buffer> buffers, const Subject& subject, std::span<at::Tensor> /*operands*/) override {
    shared_->control->expect_in_step();
    for (const auto& buffer : buffers) buffer.unsharded->attach(shared_->places[buffer.number].all);
    fetched_bytes_ = 0;
    if (shared_->has_one_host() || shared_->fetched == after(subject)) return {};
    Works works;
    for_each_group(
        buffers, [](const Buffer& buffer) { return buffer.unsharded_dtype(); },
        [&](std::span<const Buffer> run) {
          c10::SmallVector<Piece, 2> pieces;
          for (const auto& buffer : run) {
            const auto whole = buffer.unsharded->memory_view(buffer.unsharded_dtype());
            pieces.push_back({.whole = whole, .own = whole.chunk(shared_->shard.size())[static_cast<size_t>(shared_->shard.rank())]});
            fetched_bytes_ += pieces.back().own.nbytes() * senders_;
          }
          works.push_back(shared_->shard.all_gather_on_host(pieces, subject));
        });
    works.push_back(Work(std::make_shared<Fetch>(shared_, works, after(subject))));
    return works;
  }

  bool in_place(const Buffer& /*buffer*/) const override { return true; }
  uint64_t fetched_bytes() const override { return fetched_bytes_; }

 private:
  const SharedPtr shared_;
  uint64_t senders_ = 0;  // how many ranks of other hosts send their chunks to this rank
  uint64_t fetched_bytes_ = 0;
  size_t trained_bytes_ = 0;
};

/// Work that is done when all ranks have published a version. A unit waits for one version at a time, so it reuses one object.
struct Publication final : Work::State {
  explicit Publication(SharedPtr shared) : shared(std::move(shared)) {}

  void await(const Subject& subject) {
    value = after(subject);
    unit = subject.unit;
    version = subject.version;
  }

  void wait() override {
    shared->control->wait(kPublished, value, shared->shard.limit(),
                          [&] { return fmt::format("reading version {} of unit '{}'", version, unit); });
  }
  bool done() const override { return shared->control->reached_by_all(kPublished, value); }

  const SharedPtr shared;
  uint32_t value = 0;
  std::string unit;
  uint64_t version = 0;
};

class VersionCounts final : public Turns {
 public:
  explicit VersionCounts(SharedPtr shared) : shared_(std::move(shared)), publication_(std::make_shared<Publication>(shared_)) {}

  Work wait_for_writers(const Subject& subject) override {
    if (control().reached_by_all(kPublished, after(subject))) return {};
    publication_->await(subject);
    return Work(publication_);
  }

  void done_reading(const Subject& subject) override { control().reach(kDone, after(subject)); }

  bool wait_for_readers(const Subject& subject) override {
    control().expect_in_step();
    done_reading(subject);
    return control().wait_or_yield(kDone, after(subject), shared_->shard.limit(), [&] { return still_read(subject); });
  }

  bool keep_copy(size_t buffer, const at::Tensor& own) override {
    auto& place = shared_->places[buffer];
    if (place.copy.defined()) return false;
    place.copy = at::from_blob(place.own, {own.numel()}, own.options());
    return true;
  }

  void done_writing(std::span<const Buffer> buffers, const Subject& subject, bool make_copy) override {
    const auto value = after(subject);
    if (value == published_) return;
    if (make_copy) {
      // The wait() below nearly always returns at once, because the write has already waited for the readers of the previous version.
      Subject before = subject;
      before.version--;
      control().expect_in_step();
      if (published_ != 0) control().wait(kDone, after(before), shared_->shard.limit(), [&] { return still_read(before); });
      for (const auto& buffer : buffers) {
        if (auto copy = published_copy(buffer.number); copy.defined()) buffer.codec->encode(buffer.own, copy);
      }
    }
    control().reach(kPublished, value);
    published_ = value;
  }

  at::Tensor published_copy(size_t buffer) const override { return shared_->places[buffer].copy; }

  void reset(const Subject& subject, bool again) override {
    if (again) control().reach(kDone, after(subject) - 1);
    control().back_in_step();
    shared_->fetched = 0;
    if (shared_->has_one_host()) shared_->slots->reset();
  }

 private:
  const SharedArea& control() const { return *shared_->control; }

  static std::string still_read(const Subject& subject) {
    return fmt::format(
        "writing shards of unit '{}', which ranks may still read in version {} until they take their own step or call tessera::skip_step",
        subject.unit, subject.version);
  }

  const SharedPtr shared_;
  const std::shared_ptr<Publication> publication_;
  uint32_t published_ = 0;
};

class SlotGradients final : public GradientPacking {
 public:
  explicit SlotGradients(const SharedPtr& shared) : limit_(shared->shard.limit()), slots_(shared->slots) {}

  bool packs_after_sum() override { return slots_->packs_after_sum(); }

  GradientBuffers buffers(std::span<const GradientPlan> plans) override { return slots_->buffers(plans, limit_); }

  void pack(std::span<const at::Tensor> places, std::span<const at::Tensor> gradients) const override {
    for (size_t i = 0; i < places.size(); i++) pack(places[i], gradients[i]);
  }

  void note_evaluations(uint64_t number) override { slots_->note_evaluations(number); }

  Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op, TakeMean take) override {
    return {slots_->reduce(turn_, pieces, subject, limit_, op, std::move(take))};
  }

 private:
  // Large gradients are written past the caches, because the rank that reads them may not share a cache with this one.
  static void pack(const at::Tensor& place, const at::Tensor& gradient) {
    constexpr int64_t kLarge = int64_t{1} << 20, kGrain = int64_t{1} << 18;  // bytes
    const auto bytes = static_cast<int64_t>(place.nbytes());
    if (bytes < kLarge || gradient.scalar_type() != place.scalar_type() || gradient.strides() != place.strides()) {
      place.copy_(gradient);
      return;
    }
    if (auto* const simulation = Simulation::current()) return simulation->pass_over(2 * place.nbytes());
    auto* const target = static_cast<std::byte*>(place.data_ptr());
    const auto* const source = static_cast<const std::byte*>(gradient.const_data_ptr());
    at::parallel_for(0, bytes, kGrain,
                     [&](int64_t begin, int64_t end) { detail::stream(target + begin, source + begin, static_cast<size_t>(end - begin)); });
  }

  const std::chrono::milliseconds limit_;
  const std::shared_ptr<GradientSlots> slots_;
  const std::shared_ptr<GradientSlots::Turn> turn_ = GradientSlots::make_turn();  // a unit has one reduction at a time
};

}  // namespace

std::optional<UnitMemory> node_shared_memory(const Communicator& shard, std::string& why_not) {
  auto attempt = shard.share({.bytes_per_rank = 0, .counters = kVersionCounters, .among = Among::Host}, {.unit = "version counters"});
  why_not = attempt.why_not;
  if (!attempt.area) return std::nullopt;
  const bool has_one_host = shard.topology().hosts() == 1;
  const SharedPtr shared(
      new Shared{.shard = shard, .control = std::move(attempt.area), .slots = has_one_host ? GradientSlots::of(shard) : nullptr});
  std::unique_ptr<GradientPacking> gradients;
  if (has_one_host) {
    gradients = std::make_unique<SlotGradients>(shared);
  } else {
    gradients = scattered_gradients(shard);
  }
  return UnitMemory{.residence = "node-shared",
                    .chunks = std::make_unique<SharedChunks>(shared),
                    .turns = std::make_unique<VersionCounts>(shared),
                    .gradients = std::move(gradients)};
}

}  // namespace tessera
