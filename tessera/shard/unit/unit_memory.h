// Where the parameters of a unit live: unsharded for a while, sharded all the time. The unit knows when; its memory knows how.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"
#include "tessera/shard/codec.h"
#include "tessera/shard/paging/storage_tag.h"

namespace tessera {

struct ShardOptions;

/// What made a unit unshard, for engines that record instead of running.
struct Fault {
  std::span<at::Tensor> companions = {};  // the other operands of the operator that touched the unit
};

/// Nearly always one or two: of a step, nothing is worth an allocation.
using Works = c10::SmallVector<Work, 2>;

/// One flat buffer of a unit as its memory sees it.
struct Buffer {
  size_t number = 0;           // in the order in which they were added
  TaggedStoragePtr unsharded;  // every unsharded parameter is a view of it
  at::Tensor own;              // this rank's chunk, flat, as it is stored
  const Codec* codec;

  at::ScalarType unsharded_dtype() const { return codec->computed(own.scalar_type()); }
};

/// A buffer that is about to be made.
struct BufferPlan {
  int64_t chunk = 0;
  at::ScalarType dtype;
  const Codec* codec;
  at::Device device;
  bool trained = true;
};

/// The gradients of one buffer on their way to the mean.
struct GradientPlan {
  int64_t numel = 0;
  at::ScalarType dtype;  // in which they travel
  at::Device device;
};

/// Memory to pack gradients into, one buffer for each plan. Whoever has it is the only one that packs.
struct GradientBuffers {
  c10::SmallVector<at::Tensor, 2> buffers;
  std::unique_lock<std::mutex> reservation;
};

class UnitMemory {
 public:
  virtual ~UnitMemory() = default;

  virtual std::string_view name() const = 0;
  /// The memory of this rank's chunk. Collective.
  virtual MemoryPtr add(const BufferPlan& plan) = 0;
  /// Bytes that the unit takes on this rank because it is unsharded.
  virtual uint64_t unsharded_bytes(std::span<const Buffer> buffers) const = 0;
  /// Bytes that this rank receives when the unit is unsharded.
  virtual uint64_t gathered_bytes(std::span<const Buffer> buffers) const = 0;

  /// Begins to unshard the unit, which is unsharded when all the work is done.
  virtual Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) = 0;
  /// `unsharding`: the work of an unshard() that nobody has waited for.
  virtual void reshard(std::span<const Buffer> buffers, Works unsharding) = 0;
  /// While unsharded: from now on in memory that nobody else sees, so that this rank may write there.
  virtual void make_private(std::span<const Buffer> buffers) = 0;

  /// This rank will not read this version again.
  virtual void done_reading(const Subject& subject) = 0;
  /// Before this rank's chunk changes: waits until no rank needs this version any more. False where all ranks wait to write, each for
  /// another unit: then the chunk may only change in memory that others do not see (see keep_copy).
  virtual bool wait_for_readers(const Subject& subject) = 0;
  /// Others read a copy of the buffer's own chunk from now on, which publish() makes. False if they do so already.
  virtual bool keep_copy(const Buffer& buffer) = 0;
  /// The own chunks have this version. `stale`: what others read of them has not been written along.
  virtual void publish(std::span<const Buffer> buffers, const Subject& subject, bool stale) = 0;
  /// What others read of a buffer's own chunk, where that is a copy; else undefined.
  virtual at::Tensor published(size_t buffer) const = 0;

  /// Buffers for gradients, with whatever is there.
  virtual GradientBuffers gradient_buffers(std::span<const GradientPlan> plans) = 0;
  /// Copies a gradient to its place in a buffer.
  virtual void pack(const at::Tensor& place, const at::Tensor& gradient) const { place.copy_(gradient); }
  /// The mean of the buffers that were handed out last over all ranks, of which this rank's chunk goes to the pieces' `own`.
  virtual Works reduce(std::span<const Piece> pieces, const Subject& subject) = 0;

  /// All ranks have given up what they did, and begin anew. `again`: this version is read again, although this rank was done with it.
  virtual void start_anew(const Subject& subject, bool again) = 0;
};

/// An all-gather fills memory of the device; resharding frees it. Works everywhere.
std::unique_ptr<UnitMemory> gathered_memory(Communicator shard);

/// Ranks of one host keep their chunks in one memory, in gathered order, so that a unit is unsharded without a copy. Nothing, and the
/// reason in `why_not`, where they can't. Collective.
std::unique_ptr<UnitMemory> node_shared_memory(Communicator shard, std::string& why_not);

/// As the options say. Collective.
std::unique_ptr<UnitMemory> make_unit_memory(const ShardOptions& options, const Codec& codec, at::Device device);

}  // namespace tessera
