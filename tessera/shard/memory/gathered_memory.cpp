// Gathered unit memory: works across machines and on any device.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/pinned_memory.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/memory/unit_memory.h"

namespace tessera {
namespace {

/// An all-gather with a codec that decodes: the thread that waits for it decodes the result into the unsharded memory.
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
      if (!unsharded) continue;  // the unsharded parameters are gone, because their module was taken out of the model
      const auto sent = arrival.sent.chunk(ranks_), chunks = unsharded->memory_view(arrival.dtype).chunk(ranks_);
      for (size_t rank = 0; rank < sent.size(); rank++) arrival.codec->decode(sent[rank], chunks[rank]);
    }
    arrivals_.clear();
  }
  bool done() const override { return arrivals_.empty(); }

 private:
  /// The chunks of a buffer that all ranks have sent. Does not own the unsharded storage, because that storage owns the unit, and the
  /// unit's state owns this work.
  struct Arrival {
    at::Tensor sent;
    c10::weak_intrusive_ptr<TaggedStorage> unsharded;
    at::ScalarType dtype;
    const Codec* codec;
  };

  const Work gather_;
  c10::SmallVector<Arrival, 2> arrivals_;  // empty once all buffers are decoded
  const int ranks_;
};

/// A reduction. The thread that waits for it gives the result to `take`.
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

/// Turns for chunks in host memory. The only reader of such a chunk is the device, which copies it some time after the copy was queued.
class DeviceReads final : public Turns {
 public:
  explicit DeviceReads(c10::Device device) : device_(device) {}

  c10::Device device() const { return device_; }
  /// Replaces chunks in host memory by copies on the device. Work that is queued on the current stream later sees complete copies.
  void copy(std::span<Piece> pieces) {
    for (auto& piece : pieces) piece.own = piece.own.to(device_, /*non_blocking=*/true);
    last_ = Event::record(device_);
  }

  bool wait_for_readers(const Subject& /*subject*/) override {
    last_.synchronize();
    return true;
  }

 private:
  const c10::Device device_;
  Event last_;
};

class GatheredChunks final : public Chunks {
 public:
  /// `reads`: the turns of chunks in host memory, else null. The UnitMemory of the chunks owns it.
  GatheredChunks(Communicator shard, std::optional<DiskMemoryOptions> disk, DeviceReads* reads)
      : shard_(std::move(shard)), disk_(std::move(disk)), reads_(reads) {}

  MemoryPtr add(const BufferPlan& plan) override {
    const auto bytes = static_cast<size_t>(plan.chunk) * c10::elementSize(plan.dtype);
    if (reads_ != nullptr) {
      chunks_.push_back(std::make_shared<at::DataPtr>(allocate_pinned(bytes, plan.device)));
    } else if (disk_) {
      chunks_.push_back(std::make_shared<at::DataPtr>(allocate_on_disk(bytes, *disk_, fmt::format("shards of unit '{}'", plan.unit))));
    } else {
      chunks_.push_back(allocate_memory(bytes, plan.device, plan.unit));
    }
    return chunks_.back();
  }

  bool in_place(const Buffer& buffer) const override { return is_alone(buffer) && !buffer.codec->encodes(buffer.own.scalar_type()); }

  Works fill(std::span<const Buffer> buffers, const Subject& subject, std::span<at::Tensor> operands) override {
    Works works;
    if (std::ranges::all_of(buffers, [&](const Buffer& buffer) { return is_alone(buffer); })) {
      for (const auto& buffer : buffers) {
        if (in_place(buffer)) {
          buffer.unsharded->attach(chunks_[buffer.number]);
        } else {
          buffer.unsharded->allocate(subject.unit);
          buffer.codec->encode(buffer.own, buffer.unsharded->memory_view(buffer.unsharded_dtype()));
        }
      }
      return works;
    }
    if (disk_) {
      for (const auto& buffer : buffers) read_pages_ahead(buffer.own.const_data_ptr(), buffer.own.nbytes());
    }
    // All memory is allocated before the first collective, because a collective can't be cancelled.
    for (const auto& buffer : buffers) buffer.unsharded->allocate(subject.unit);
    c10::SmallVector<Piece, 2> all;
    for (const auto& buffer : buffers) all.push_back({.whole = arrival(buffer), .own = buffer.own});
    std::optional<c10::StreamGuard> beside;
    if (reads_ != nullptr) {
      const auto is_free = Event::record(reads_->device());  // work queued before may still use the memory that is filled
      beside.emplace(copy_stream(reads_->device(), Copying::ToDevice));
      reads_->copy(all);
      is_free.block();
    }
    for_each_group(
        buffers, [](const Buffer& buffer) { return std::pair(buffer.sent_form().dtype, buffer.decodes()); },
        [&](std::span<const Buffer> run) {
          const auto pieces = std::span(all).subspan(static_cast<size_t>(run.data() - buffers.data()), run.size());
          for (size_t i = 0; i < run.size(); i++) pieces[i].own = encoded(*run[i].codec, pieces[i].own);
          auto work = shard_.all_gather(pieces, subject, operands);
          if (run.front().decodes()) work = Work(std::make_shared<Decoding>(std::move(work), run, pieces, shard_.size()));
          works.push_back(std::move(work));
        });
    return works;
  }

 private:
  /// Whether this rank is alone, on a device, and values are sent in the form that operators compute with, so that nothing is gathered. (On
  /// the CPU, a program that asks for this memory asks for a copy.)
  bool is_alone(const Buffer& buffer) const {
    return shard_.size() == 1 && !shard_.traits().traces && !buffer.own.is_cpu() && !buffer.decodes();
  }

  /// The tensor to which the all-gather writes: the unsharded memory itself, unless the result has to be decoded.
  at::Tensor arrival(const Buffer& buffer) const {
    if (!buffer.decodes()) return buffer.unsharded->memory_view(buffer.unsharded_dtype());
    const auto sent = buffer.sent_form();
    return at::empty({sent.numel * shard_.size()}, at::TensorOptions(sent.dtype).device(buffer.unsharded->device()));
  }

  const Communicator shard_;
  const std::optional<DiskMemoryOptions> disk_;
  DeviceReads* const reads_;
  std::vector<MemoryPtr> chunks_ = {};  // this rank's chunks
};

/// Gradients are packed into memory of their own and reduce-scattered.
class ScatteredGradients final : public GradientPacking {
 public:
  explicit ScatteredGradients(Communicator shard) : shard_(std::move(shard)) {}

  bool packs_after_sum() override { return false; }

  GradientBuffers buffers(std::span<const GradientPlan> plans) override {
    const MemoryScope scope(MemoryKind::Reduction);
    GradientBuffers result;
    for (const auto& plan : plans) {
      result.buffers.push_back(at::empty({plan.numel}, at::TensorOptions().dtype(plan.dtype).device(plan.device)));
    }
    return result;
  }

  void pack(std::span<const at::Tensor> places, std::span<const at::Tensor> gradients) const override {
    // A GPU copies all gradients that have the strides of their places in one kernel. If one gradient with other strides were among them,
    // the GPU would run one kernel for each gradient.
    c10::SmallVector<at::Tensor, 32> alike, values;
    for (size_t i = 0; i < places.size(); i++) {
      if (places[i].is_cuda() && places[i].strides() == gradients[i].strides()) {
        alike.push_back(places[i]);
        values.push_back(gradients[i]);
      } else {
        at::Tensor(places[i]).copy_(gradients[i]);
      }
    }
    if (!alike.empty()) at::_foreach_copy_(alike, values);
  }

  Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op, TakeMean take) override {
    if (take) return {Work(reduce_and_hand(pieces, subject, op, std::move(take)))};
    Works works;
    for_each_group(
        pieces, [](const Piece& piece) { return piece.whole.scalar_type(); },
        [&](std::span<const Piece> run) { works.push_back(shard_.reduce_scatter(run, {.op = op}, subject)); });
    return works;
  }

 private:
  // The sum is computed in at least float32. It is stored in the piece's `own`, a part of the buffer, or in new memory if `own` is
  // narrower.
  std::shared_ptr<Handing> reduce_and_hand(std::span<const Piece> pieces, const Subject& subject, Reduce op, TakeMean take) {
    c10::SmallVector<Piece, 2> sums(pieces.begin(), pieces.end());
    for (auto& piece : sums) {
      const auto dtype = at::promoteTypes(piece.own.scalar_type(), at::kFloat);
      if (piece.own.scalar_type() != dtype) piece.own = at::empty_like(piece.own, piece.own.options().dtype(dtype));
    }
    return std::make_shared<Handing>(reduce(sums, subject, op, {}), sums, std::move(take));
  }

  const Communicator shard_;
};

}  // namespace

std::unique_ptr<GradientPacking> scattered_gradients(const Communicator& shard) {
  return std::make_unique<ScatteredGradients>(shard);
}

UnitMemory gathered_memory(const Communicator& shard, std::optional<DiskMemoryOptions> disk, std::optional<c10::Device> copied_to) {
  auto reads = copied_to ? std::make_unique<DeviceReads>(*copied_to) : nullptr;
  return {.residence = copied_to ? "gathered, host" : "gathered",
          .disk = disk,
          .chunks = std::make_unique<GatheredChunks>(shard, disk, reads.get()),
          .turns = reads ? std::move(reads) : std::make_unique<Turns>(),
          .gradients = scattered_gradients(shard)};
}

}  // namespace tessera
