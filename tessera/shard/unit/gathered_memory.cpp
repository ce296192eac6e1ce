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

  Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) override {
    Works works;
    for (const auto& buffer : buffers) buffer.unsharded->allocate();  // all of it, before anything is under way that can't be called back
    for_each_run(
        buffers, [](const Buffer& buffer) { return buffer.unsharded_dtype; },
        [&](std::span<const Buffer> run) {
          c10::SmallVector<Piece, 2> pieces;
          for (const auto& buffer : run) {
            pieces.push_back({.whole = buffer.unsharded->memory_view(buffer.unsharded_dtype), .own = buffer.own.to(buffer.unsharded_dtype)});
          }
          works.push_back(shard_.all_gather(pieces, subject, fault.companions));
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
  Communicator shard_;
};

}  // namespace

std::unique_ptr<UnitMemory> gathered_memory(Communicator shard) {
  return std::make_unique<GatheredMemory>(std::move(shard));
}

}  // namespace tessera
