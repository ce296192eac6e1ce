// The memory of a unit that works everywhere: across machines, on any device.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/shard/unit/unit_memory.h"

namespace tessera {
namespace {

/// Calls `act` with each stretch of neighbours that are alike by `key`: one call for all buffers of a dtype, since a tracing engine ties
/// them together, and an eager one saves an exchange.
template <class Item, class Key, class Act>
void for_each_run(std::span<const Item> items, const Key& key, const Act& act) {
  for (size_t first = 0; first < items.size();) {
    size_t next = first + 1;
    while (next < items.size() && key(items[next]) == key(items[first])) next++;
    act(items.subspan(first, next - first));
    first = next;
  }
}

/// A gather whose result is decoded into the unsharded memory by whoever waits for it.
class Decoding final : public Work::State {
 public:
  Decoding(Work gather, std::span<const Buffer> buffers, std::span<const Piece> pieces, int ranks)
      : gather_(std::move(gather)), buffers_(buffers.begin(), buffers.end()), ranks_(ranks) {
    for (const auto& piece : pieces) sent_.push_back(piece.whole);
  }

  void wait() override {
    gather_.wait();
    for (size_t i = 0; i < sent_.size(); i++) {
      const auto& buffer = buffers_[i];
      const auto computed = buffer.unsharded->memory_view(buffer.unsharded_dtype());
      const auto sent = sent_[i].chunk(ranks_), chunks = computed.chunk(ranks_);
      for (size_t rank = 0; rank < sent.size(); rank++) buffer.codec->decode(sent[rank], chunks[rank]);
    }
    sent_.clear();
  }
  bool done() const override { return sent_.empty(); }

 private:
  const Work gather_;
  const c10::SmallVector<Buffer, 2> buffers_;
  c10::SmallVector<at::Tensor, 2> sent_;  // by all ranks; none once it is decoded
  const int ranks_;
};

class GatheredMemory final : public UnitMemory {
 public:
  explicit GatheredMemory(Communicator shard) : shard_(std::move(shard)) {}

  std::string_view name() const override { return "gathered"; }

  MemoryPtr add(const BufferPlan& plan) override {
    return allocate_memory(static_cast<size_t>(plan.chunk) * c10::elementSize(plan.dtype), plan.device);
  }

  uint64_t unsharded_bytes(std::span<const Buffer> buffers) const override {
    uint64_t bytes = 0;
    for (const auto& buffer : buffers) bytes += buffer.unsharded->nbytes();
    return bytes;
  }

  uint64_t gathered_bytes(std::span<const Buffer> buffers) const override {
    uint64_t bytes = 0;
    for (const auto& buffer : buffers) {
      const auto sent = sent_form(buffer);
      bytes += static_cast<uint64_t>(sent.numel) * c10::elementSize(sent.dtype) * static_cast<uint64_t>(shard_.size() - 1);
    }
    return bytes;
  }

  Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) override {
    Works works;
    for (const auto& buffer : buffers) buffer.unsharded->allocate();  // all of it, before anything is under way that can't be called back
    for_each_run(
        buffers, [](const Buffer& buffer) { return sent_form(buffer).dtype; },
        [&](std::span<const Buffer> run) {
          c10::SmallVector<Piece, 2> pieces;
          for (const auto& buffer : run) pieces.push_back({.whole = arrival(buffer), .own = encoded(*buffer.codec, buffer.own)});
          auto work = shard_.all_gather(pieces, subject, fault.companions);
          if (run.front().codec->decodes()) work = Work(std::make_shared<Decoding>(std::move(work), run, pieces, shard_.size()));
          works.push_back(std::move(work));
        });
    return works;
  }

  void reshard(std::span<const Buffer> buffers, Works unsharding) override {
    for (const auto& work : unsharding) {
      try {
        work.wait();
      } catch (const std::exception&) {
        // Whoever needs the unit gets the error; who reshards it does not care.
      }
    }
    for (const auto& buffer : buffers) buffer.unsharded->release();
  }

  void make_private(std::span<const Buffer> /*buffers*/) override {}
  void done_reading(const Subject& /*subject*/) override {}
  bool wait_for_readers(const Subject& /*subject*/) override { return true; }
  bool keep_copy(const Buffer& /*buffer*/) override { return false; }
  void publish(std::span<const Buffer> /*buffers*/, const Subject& /*subject*/, bool /*stale*/) override {}
  at::Tensor published(size_t /*buffer*/) const override { return {}; }

  GradientBuffers gradient_buffers(std::span<const GradientPlan> plans) override {
    GradientBuffers result;
    for (const auto& plan : plans) {
      result.buffers.push_back(at::empty({plan.numel}, at::TensorOptions().dtype(plan.dtype).device(plan.device)));
    }
    return result;
  }

  Works reduce(std::span<const Piece> pieces, const Subject& subject) override {
    Works works;
    for_each_run(
        pieces, [](const Piece& piece) { return piece.whole.scalar_type(); },
        [&](std::span<const Piece> run) { works.push_back(shard_.reduce_scatter(run, {.op = Reduce::Mean}, subject)); });
    return works;
  }

  void start_anew(const Subject& /*subject*/, bool /*again*/) override {}

 private:
  static Codec::Form sent_form(const Buffer& buffer) { return buffer.codec->sent(buffer.own.scalar_type(), buffer.own.numel()); }

  /// Where a gather leaves what all ranks have sent: in the unsharded memory itself, unless it has to be decoded.
  at::Tensor arrival(const Buffer& buffer) const {
    if (!buffer.codec->decodes()) return buffer.unsharded->memory_view(buffer.unsharded_dtype());
    const auto sent = sent_form(buffer);
    return at::empty({sent.numel * shard_.size()}, buffer.own.options().dtype(sent.dtype));
  }

  Communicator shard_;
};

}  // namespace

std::unique_ptr<UnitMemory> gathered_memory(Communicator shard) {
  return std::make_unique<GatheredMemory>(std::move(shard));
}

}  // namespace tessera
