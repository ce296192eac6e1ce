// The memory of a unit, in three parts: Chunks (where the chunks of all ranks lie), Turns (how readers and writers of chunks take turns)
// and GradientPacking (where gradients are packed). Each residence combines an implementation of each part.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/disk_memory.h"
#include "tessera/comm/communicator.h"
#include "tessera/shard/codec.h"
#include "tessera/shard/storage/storage_tag.h"

namespace tessera {

struct ShardOptions;

/// A unit nearly always has one or two works at a time, so a step allocates no memory for them.
using Works = c10::SmallVector<Work, 2>;

/// Calls `act` with each run of neighbours that have the same key. With the dtype as the key, all buffers of a dtype take part in one
/// collective: an eager transport saves exchanges, and a tracing transport ties them together.
template <class Item, class Key, class Act>
void for_each_group(std::span<const Item> items, const Key& key, const Act& act) {
  for (size_t first = 0; first < items.size();) {
    size_t next = first + 1;
    while (next < items.size() && key(items[next]) == key(items[first])) next++;
    act(items.subspan(first, next - first));
    first = next;
  }
}

/// The flat buffer of one group.
struct Buffer {
  size_t number = 0;           // index of the Chunks::add() call that made it
  TaggedStoragePtr unsharded;  // the unsharded parameters are views of it
  at::Tensor own;              // this rank's chunk in its stored form, flat
  const Codec* codec;

  at::ScalarType unsharded_dtype() const { return codec->computed(own.scalar_type()); }
  bool decodes() const { return codec->decodes(own.scalar_type()); }
  Codec::Form sent_form() const { return codec->sent(own.scalar_type(), own.numel()); }
};

using Buffers = c10::SmallVector<Buffer, 2>;

/// A buffer to be made.
struct BufferPlan {
  std::string_view unit;  // the name of the unit
  int64_t chunk = 0;
  at::ScalarType dtype;
  const Codec* codec;
  at::Device device;
  bool trained = true;
};

/// The memory where the chunks of all ranks lie.
class Chunks {
 public:
  virtual ~Chunks() = default;

  /// The memory of this rank's chunk. Collective.
  virtual MemoryPtr add(const BufferPlan& plan) = 0;
  /// Gives the unsharded storages memory, and starts to fill it. It holds the chunks of all ranks when all returned work is done.
  /// `operands`: the other operands of the operator for which the unit is unsharded, for transports that trace.
  virtual Works fill(std::span<const Buffer> buffers, const Subject& subject, std::span<at::Tensor> operands) = 0;
  /// Whether the unsharded memory of a buffer is where the chunks lie, so that unsharding takes no memory.
  virtual bool in_place(const Buffer& buffer) const = 0;
  /// Bytes that this rank receives from other hosts by the last fill() of chunks that lie in place.
  virtual uint64_t fetched_bytes() const { return 0; }
};

/// Makes ranks take turns if other ranks of the host, or a device, read this rank's chunk in place: no rank may write a chunk that another
/// rank still reads, or read a chunk before its owner has written it. This base class is for chunks that only their owner reads, so its
/// functions wait for nothing.
class Turns {
 public:
  virtual ~Turns() = default;

  /// Returns work that is done when all ranks have published this version.
  virtual Work wait_for_writers(const Subject& /*subject*/) { return {}; }
  /// Tells the other ranks that this rank will not read this version again.
  virtual void done_reading(const Subject& /*subject*/) {}
  /// Waits until all ranks are done reading this version, so that this rank's chunk may change. Returns false if all ranks are waiting to
  /// write, each for another unit. In that case the chunk may change only in memory that other ranks do not read (see keep_copy).
  virtual bool wait_for_readers(const Subject& /*subject*/) { return true; }
  /// Makes other ranks read a copy of a buffer's own chunk, which done_writing() makes. Returns false if they already read a copy.
  virtual bool keep_copy(size_t /*buffer*/, const at::Tensor& /*own*/) { return false; }
  /// Makes this version of the own chunks readable by other ranks. `make_copy`: whether this call has to make the copies that other ranks
  /// read.
  virtual void done_writing(std::span<const Buffer> /*buffers*/, const Subject& /*subject*/, bool /*make_copy*/) {}
  /// The copy of a buffer's own chunk that other ranks read. Undefined if they read the chunk itself.
  virtual at::Tensor published_copy(size_t /*buffer*/) const { return {}; }
  /// Abandons reads and writes in progress. All ranks call it, inside tessera::recover. `again`: whether this rank is going to read this
  /// version again, which takes back its done_reading().
  virtual void reset(const Subject& /*subject*/, bool /*again*/) {}
};

/// Returns this rank's group when a shard group is divided into groups of `ranks` consecutive ranks. Only the first call is collective.
Communicator consecutive_ranks(const Communicator& shard, int ranks);

/// This rank's part of a partly resharded unit (an integer reshard_after_forward). A few ranks together keep the unsharded form, and
/// all-gather it among themselves.
class KeptPart {
 public:
  /// Divides the unsharded form among `ranks` consecutive ranks. Collective.
  KeptPart(const Communicator& shard, int ranks);

  void keep(std::span<const Buffer> buffers);
  void drop() { parts_.clear(); }
  uint64_t bytes() const;
  /// Bytes that this rank receives in fill().
  uint64_t gathered_bytes() const { return bytes() * static_cast<uint64_t>(few_.size() - 1); }
  /// As Chunks::fill.
  Works fill(std::span<const Buffer> buffers, const Subject& subject, std::span<at::Tensor> operands) const;

 private:
  Communicator few_;
  c10::SmallVector<at::Tensor, 2> parts_;  // this rank's part of each buffer
};

/// A buffer of packed gradients to be made.
struct GradientPlan {
  int64_t numel = 0;
  at::ScalarType dtype;  // the dtype in which the gradients are sent
  at::Device device;
};

/// Memory to pack gradients into, one buffer for each plan. While it is held, no other thread can pack.
struct GradientBuffers {
  c10::SmallVector<at::Tensor, 2> buffers;
  std::unique_lock<std::mutex> reservation;
};

/// Computes values of this rank's part of a piece's mean, from `begin` on, into `target`.
using PartOfMean = c10::function_ref<void(size_t piece, int64_t begin, const at::Tensor& target)>;
/// Takes the mean part by part, as it is computed.
using TakeMean = std::function<void(const PartOfMean& mean)>;
/// Gives `take` a mean that is complete in the pieces' `own`.
void give_mean(std::span<const Piece> pieces, const TakeMean& take);

/// The memory where gradients are packed, and added up over the ranks.
class GradientPacking {
 public:
  virtual ~GradientPacking() = default;

  /// Whether buffers() waits for the sum of the gradients that were packed before, because there is no other memory to pack into.
  virtual bool packs_after_sum() = 0;
  /// Buffers to pack gradients into, not initialized.
  virtual GradientBuffers buffers(std::span<const GradientPlan> plans) = 0;
  /// Copies gradients to their places in a buffer.
  virtual void pack(std::span<const at::Tensor> places, std::span<const at::Tensor> gradients) const = 0;
  /// Starts a reduce-scatter over all ranks of the buffers from the last call of buffers(), which are the pieces' `whole`. Without `take`,
  /// this rank's part of the result is stored in the pieces' `own`. With `take`, the thread that waits for the returned work gives that
  /// part to `take`; the caller must then pass this rank's place in `whole` as `own`, and can't use its values afterwards.
  virtual Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op, TakeMean take) = 0;
  /// Sets how many evaluations this rank has begun, for a warning if only some ranks evaluate, which works only with shared memory.
  virtual void note_evaluations(uint64_t /*number*/) {}
};

struct UnitMemory {
  std::string_view residence;
  std::optional<DiskMemoryOptions> disk = {};  // set if this rank's chunk lies on disk
  std::unique_ptr<Chunks> chunks;
  std::unique_ptr<Turns> turns;
  std::unique_ptr<GradientPacking> gradients;

  /// Whether unsharding makes a copy of the chunks, which takes memory until the unit is resharded.
  bool copies(std::span<const Buffer> buffers) const { return unsharded_bytes(buffers) > 0; }
  /// Bytes that the unit additionally takes on this rank while it is unsharded.
  uint64_t unsharded_bytes(std::span<const Buffer> buffers) const;
  /// Bytes that this rank receives when the unit is unsharded among `ranks` ranks.
  uint64_t gathered_bytes(std::span<const Buffer> buffers, int ranks) const;
  /// Releases the unsharded form. `unsharding` is the work of Chunks::fill if it was not waited for.
  void release(std::span<const Buffer> buffers, Works unsharding) const;
  /// Lets the operating system drop the pages of this rank's chunk, if it is on disk, until they are used again.
  void evict(std::span<const Buffer> buffers) const;
};

/// Memory that an all-gather fills and that resharding frees. Works everywhere. `disk`: where the shards lie, if not in memory.
/// `copied_to`: if the shards are in pinned host memory, the device to which they are copied before they are gathered.
UnitMemory gathered_memory(const Communicator& shard, std::optional<DiskMemoryOptions> disk = {},
                           std::optional<c10::Device> copied_to = {});

/// Memory that the ranks of a host share: the chunks of all ranks lie in rank order, so a unit is unsharded without a copy. Over two
/// levels, the chunks of other hosts are fetched once for each version. Returns nothing, and the reason in `why_not`, if the ranks can't
/// share memory. Collective.
std::optional<UnitMemory> node_shared_memory(const Communicator& shard, std::string& why_not);

/// Gradients that are packed into memory of their own and reduce-scattered.
std::unique_ptr<GradientPacking> scattered_gradients(const Communicator& shard);

/// The memory that ShardOptions::residence and TESSERA_RESIDENCE ask for. `decodes`: whether the codec decodes some of the unit's values.
/// Collective.
UnitMemory make_unit_memory(const ShardOptions& options, bool decodes, at::Device device);

}  // namespace tessera
