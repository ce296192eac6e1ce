// Where the parameters of a unit live: whole for a while, cut for ever. The unit knows when; the residence knows how.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/SmallVector.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"
#include "tessera/shard/unit/gradient_slots.h"

namespace tessera {

struct ShardOptions;

/// What a read is about, for engines that record instead of running.
struct Fault {
  std::span<at::Tensor> companions = {};  // the other operands of the operator that touched the unit
};

/// Nearly always one or two: of a step, nothing is worth an allocation.
using Works = c10::SmallVector<Work, 2>;

/// One flat buffer of a unit as its residence sees it.
struct Buffer {
  size_t number = 0;                          // in the order in which they were added
  c10::intrusive_ptr<c10::StorageImpl> unsharded;  // every parameter is a view of it
  at::ScalarType unsharded_dtype;
  at::Tensor own;  // this rank's chunk, flat, in the dtype that optimizers work in
};

/// A buffer that is about to be made.
struct BufferPlan {
  int64_t chunk = 0;
  at::ScalarType dtype, unsharded_dtype;
  at::Device device;
  bool trained = true;
};

///      cut  --read(version)-->  whole  --reshard()-->  cut
///      cut  --write(version)-->  own parts may change, which the next read or publish() shows to the others as the next version
class UnitMemory {
 public:
  virtual ~UnitMemory() = default;

  virtual std::string_view name() const = 0;
  /// The memory of this rank's chunk. Collective.
  virtual std::shared_ptr<at::DataPtr> add(const BufferPlan& plan) = 0;
  /// Bytes that the unit takes on this rank because it is whole.
  virtual uint64_t unsharded_bytes(std::span<const Buffer> buffers) const = 0;

  /// Begins to make the unit whole; it is when all the work is done.
  virtual Works read(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) = 0;
  /// `coming`: of a read that nobody has waited for.
  virtual void reshard(std::span<const Buffer> buffers, Works coming) = 0;
  /// While whole: from now on in memory that nobody else sees, so that this rank may write there.
  virtual void make_private(std::span<const Buffer> buffers) = 0;

  /// This rank will not read this version again.
  virtual void done_reading(const Subject& subject) = 0;
  /// Somebody is about to change the own parts: waits until nobody needs this version any more. False where all ranks wait to write, each
  /// for another unit: then the own parts may only change in memory that others do not see (see keep_copy).
  virtual bool write(const Subject& subject) = 0;
  /// Others read a copy of the buffer's own part from now on, which publish() makes. False if they do so already.
  virtual bool keep_copy(const Buffer& buffer) = 0;
  /// The own parts have this version. `stale`: what others read of them has not been written along.
  virtual void publish(std::span<const Buffer> buffers, const Subject& subject, bool stale) = 0;
  /// What others read of a buffer's own part, if that is something else.
  virtual at::Tensor published(size_t buffer) const = 0;

  /// Room for gradients, whole, with whatever is there; and their mean over all ranks, of which the own part goes to `own`. The room is to
  /// be kept until that has begun.
  virtual GradientRoom gradient_room(std::span<const GradientPlan> plans) = 0;
  /// Copies a gradient to its place in the room.
  virtual void pack(const at::Tensor& room, const at::Tensor& gradient) const { room.copy_(gradient); }
  virtual Works reduce(std::span<const Piece> pieces, const Subject& subject) = 0;
  /// All ranks have given up what they did, and begin anew. `again`: this version is read again, although this rank was done with it.
  virtual void start_anew(const Subject& subject, bool again) = 0;
};

/// An all-gather fills memory of the device; giving back frees it. Works everywhere.
std::unique_ptr<UnitMemory> gathered_memory(Communicator shard);

/// Ranks of one host keep their chunks in one memory, in gathered order, so that a unit is whole without a copy. Nothing, and the reason in
/// `why_not`, where they can't. Collective.
std::unique_ptr<UnitMemory> node_shared_memory(Communicator shard, std::string& why_not);

/// As the options say. Collective.
std::unique_ptr<UnitMemory> make_unit_memory(const ShardOptions& options, at::Device device);

}  // namespace tessera
