// Gathered unit memory: works across machines and on any device.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "tessera/shard/unit/unit_memory.h"

namespace tessera {
namespace {

/// Calls `act` with each run of neighbours that have the same key. With the dtype as the key, all buffers of a dtype take part in one
/// collective: an eager transport saves exchanges, and a tracing one ties them together.
template <class Item, class Key, class Act>
void for_each_run(std::span<const Item> items, const Key& key, const Act& act) {
  for (size_t first = 0; first < items.size();) {
    size_t next = first + 1;
    while (next < items.size() && key(items[next]) == key(items[first])) next++;
    act(items.subspan(first, next - first));
    first = next;
  }
}

/// An all-gather whose result is decoded into the unsharded memory by the thread that waits for it.
class Decoding final : public Work::State {
 public:
  Decoding(Work gather, std::span<const Buffer> buffers, std::span<const Piece> pieces, int ranks)
      : gather_(std::move(gather)), ranks_(ranks) {
    for (size_t i = 0; i < buffers.size(); i++) {
      arrivals_.push_back({.sent = pieces[i].whole,
                           .unsharded = c10::weak_intrusive_ptr<TaggedStorage>(buffers[i].unsharded),
                           .dtype = buffers[i].unsharded_dtype(),
                           .codec = buffers[i].codec});
    }
  }

  void wait() override {
    gather_.wait();
    for (const auto& arrival : arrivals_) {
      const auto unsharded = arrival.unsharded.lock();
      if (!unsharded) continue;  // its module was taken out of the model
      const auto sent = arrival.sent.chunk(ranks_), chunks = unsharded->memory_view(arrival.dtype).chunk(ranks_);
      for (size_t rank = 0; rank < sent.size(); rank++) arrival.codec->decode(sent[rank], chunks[rank]);
    }
    arrivals_.clear();
  }
  bool done() const override { return arrivals_.empty(); }

 private:
  /// What all ranks have sent of a buffer. It does not own the buffer's unit, whose state owns this work.
  struct Arrival {
    at::Tensor sent;
    c10::weak_intrusive_ptr<TaggedStorage> unsharded;
    at::ScalarType dtype;
    const Codec* codec;
  };

  const Work gather_;
  c10::SmallVector<Arrival, 2> arrivals_;  // empty once all are decoded
  const int ranks_;
};

/// This rank's group if a shard group is divided into groups of so many consecutive ranks. Collective.
Communicator consecutive_ranks(const Communicator& shard, int ranks) {
  std::vector<int> colors;
  for (int rank = 0; rank < shard.size(); rank++) colors.push_back(rank / ranks);
  return shard.part(colors);
}

/// A reduction whose result the thread that waits for it hands on.
class Handing final : public Work::State {
 public:
  Handing(Works reductions, std::span<const Piece> pieces, TakeMean take)
      : reductions_(std::move(reductions)), pieces_(pieces.begin(), pieces.end()), take_(std::move(take)) {}

  void wait() override {
    for (const auto& work : reductions_) work.wait();
    if (const auto take = std::exchange(take_, {})) give_mean(pieces_, take);
  }
  bool done() const override { return !take_; }

 private:
  const Works reductions_;
  const c10::SmallVector<Piece, 2> pieces_;
  TakeMean take_;
};

class GatheredMemory final : public UnitMemory {
 public:
  GatheredMemory(Communicator shard, std::optional<DiskMemoryOptions> disk) : shard_(std::move(shard)), disk_(std::move(disk)) {}

  std::string_view name() const override { return "gathered"; }

  MemoryPtr add(const BufferPlan& plan) override {
    const auto bytes = static_cast<size_t>(plan.chunk) * c10::elementSize(plan.dtype);
    if (!disk_) return allocate_memory(bytes, plan.device);
    return std::make_shared<at::DataPtr>(allocate_on_disk(bytes, *disk_, fmt::format("shards of unit '{}'", plan.unit)));
  }

  uint64_t unsharded_bytes(std::span<const Buffer> buffers) const override {
    uint64_t bytes = 0;
    for (const auto& buffer : buffers) bytes += buffer.unsharded->nbytes();
    return bytes;
  }

  uint64_t gathered_bytes(std::span<const Buffer> buffers) const override {
    if (!parts_.empty()) return part_bytes() * static_cast<uint64_t>(few_->size() - 1);
    uint64_t bytes = 0;
    for (const auto& buffer : buffers) {
      const auto sent = sent_form(buffer);
      bytes += static_cast<uint64_t>(sent.numel) * c10::elementSize(sent.dtype) * static_cast<uint64_t>(shard_.size() - 1);
    }
    return bytes;
  }

  Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) override {
    Works works;
    if (disk_) {
      for (const auto& buffer : buffers) read_pages_ahead(buffer.own.const_data_ptr(), buffer.own.nbytes());
    }
    for (const auto& buffer : buffers) buffer.unsharded->allocate();  // all before the first collective, which can't be cancelled
    if (!parts_.empty()) return unshard_from_parts(buffers, subject, fault);
    for_each_run(
        buffers, [](const Buffer& buffer) { return std::pair(sent_form(buffer).dtype, buffer.decodes()); },
        [&](std::span<const Buffer> run) {
          c10::SmallVector<Piece, 2> pieces;
          for (const auto& buffer : run) pieces.push_back({.whole = arrival(buffer), .own = encoded(*buffer.codec, buffer.own)});
          auto work = shard_.all_gather(pieces, subject, fault.companions);
          if (run.front().decodes()) work = Work(std::make_shared<Decoding>(std::move(work), run, pieces, shard_.size()));
          works.push_back(std::move(work));
        });
    return works;
  }

  void divide_after_forward(int ranks) override {
    drop_part();
    few_.reset();
    if (ranks != shard_.size()) few_ = consecutive_ranks(shard_, ranks);
  }

  bool keep_part(std::span<const Buffer> buffers) override {
    if (!few_) return false;
    for (const auto& buffer : buffers) parts_.push_back(few_->own_chunk(computed(buffer)).clone());
    return true;
  }

  void drop_part() override { parts_.clear(); }

  uint64_t part_bytes() const override {
    uint64_t bytes = 0;
    for (const auto& part : parts_) bytes += part.nbytes();
    return bytes;
  }

  void reshard(std::span<const Buffer> buffers, Works unsharding) override {
    for (const auto& work : unsharding) {
      try {
        work.wait();
      } catch (const std::exception&) {
        // Resharding does not need the result. Code that does need the unit gets the error when it waits itself.
      }
    }
    for (const auto& buffer : buffers) buffer.unsharded->release();
    evict(buffers);
  }

  void make_private(std::span<const Buffer> /*buffers*/) override {}
  void done_reading(const Subject& /*subject*/) override {}
  bool wait_for_readers(const Subject& /*subject*/) override { return true; }
  bool keep_copy(const Buffer& /*buffer*/) override { return false; }
  void publish(std::span<const Buffer> buffers, const Subject& /*subject*/, bool /*make_copy*/) override { evict(buffers); }
  at::Tensor published_copy(size_t /*buffer*/) const override { return {}; }

  GradientBuffers gradient_buffers(std::span<const GradientPlan> plans) override {
    GradientBuffers result;
    for (const auto& plan : plans) {
      result.buffers.push_back(at::empty({plan.numel}, at::TensorOptions().dtype(plan.dtype).device(plan.device)));
    }
    return result;
  }

  Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op) override {
    Works works;
    for_each_run(
        pieces, [](const Piece& piece) { return piece.whole.scalar_type(); },
        [&](std::span<const Piece> run) { works.push_back(shard_.reduce_scatter(run, {.op = op}, subject)); });
    return works;
  }

  // The sum may lie in the buffer, if its dtype is that of the gradients.
  Works reduce(std::span<const Piece> pieces, const Subject& subject, TakeMean take) override {
    c10::SmallVector<Piece, 2> sums(pieces.begin(), pieces.end());
    for (auto& piece : sums) {
      const auto dtype = at::promoteTypes(piece.own.scalar_type(), at::kFloat);
      if (piece.own.scalar_type() != dtype) piece.own = at::empty_like(piece.own, piece.own.options().dtype(dtype));
    }
    return {Work(std::make_shared<Handing>(reduce(sums, subject, Reduce::Mean), sums, std::move(take)))};
  }

  void start_anew(const Subject& /*subject*/, bool /*again*/) override {}

 private:
  static Codec::Form sent_form(const Buffer& buffer) { return buffer.codec->sent(buffer.own.scalar_type(), buffer.own.numel()); }

  void evict(std::span<const Buffer> buffers) const {
    if (!disk_) return;
    for (const auto& buffer : buffers) evict_pages(buffer.own.const_data_ptr(), buffer.own.nbytes());
  }

  static at::Tensor computed(const Buffer& buffer) { return buffer.unsharded->memory_view(buffer.unsharded_dtype()); }

  Works unshard_from_parts(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) {
    Works works;
    size_t next = 0;
    for_each_run(
        buffers, [](const Buffer& buffer) { return buffer.unsharded_dtype(); },
        [&](std::span<const Buffer> run) {
          c10::SmallVector<Piece, 2> pieces;
          for (const auto& buffer : run) pieces.push_back({.whole = computed(buffer), .own = parts_[next++]});
          works.push_back(few_->all_gather(pieces, subject, fault.companions));
        });
    return works;
  }

  /// The tensor to which the all-gather writes: the unsharded memory itself, unless the result has to be decoded.
  at::Tensor arrival(const Buffer& buffer) const {
    if (!buffer.decodes()) return computed(buffer);
    const auto sent = sent_form(buffer);
    return at::empty({sent.numel * shard_.size()}, buffer.own.options().dtype(sent.dtype));
  }

  Communicator shard_;
  const std::optional<DiskMemoryOptions> disk_;
  std::optional<Communicator> few_;        // among which a partly resharded unit is divided, if it ever is
  c10::SmallVector<at::Tensor, 2> parts_;  // of the buffers of a partly resharded unit
};

}  // namespace

std::unique_ptr<UnitMemory> gathered_memory(Communicator shard, std::optional<DiskMemoryOptions> disk) {
  return std::make_unique<GatheredMemory>(std::move(shard), std::move(disk));
}

}  // namespace tessera
