// UnitMemory: the memory of a unit's shards, unsharded parameters and gradients, and how data moves between them.
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
#include "tessera/shard/paging/storage_tag.h"

namespace tessera {

struct ShardOptions;

/// The page fault for which a unit is unsharded. Only transports that trace look at it.
struct Fault {
  std::span<at::Tensor> companions = {};  // the operator's other operands
};

/// A unit nearly always has one or two works at a time, so a step allocates no memory for them.
using Works = c10::SmallVector<Work, 2>;

/// The flat buffer of one group.
struct Buffer {
  size_t number = 0;           // counts the calls of UnitMemory::add
  TaggedStoragePtr unsharded;  // the unsharded parameters are views of it
  at::Tensor own;              // this rank's chunk in its stored form, flat
  const Codec* codec;

  at::ScalarType unsharded_dtype() const { return codec->computed(own.scalar_type()); }
  bool decodes() const { return codec->decodes(own.scalar_type()); }
};

/// A buffer to be made.
struct BufferPlan {
  std::string_view unit;  // its name
  int64_t chunk = 0;
  at::ScalarType dtype;
  const Codec* codec;
  at::Device device;
  bool trained = true;
};

/// A buffer of packed gradients to be made.
struct GradientPlan {
  int64_t numel = 0;
  at::ScalarType dtype;  // in which the gradients are sent
  at::Device device;
};

/// Memory to pack gradients into, one buffer for each plan. While it is held, no other thread can pack.
struct GradientBuffers {
  c10::SmallVector<at::Tensor, 2> buffers;
  std::unique_lock<std::mutex> reservation;
};

/// Computes values of this rank's part of a piece's mean, from `begin` on. They go to `target`.
using PartOfMean = c10::function_ref<void(size_t piece, int64_t begin, const at::Tensor& target)>;
/// Takes the mean part by part, as it is computed.
using TakeMean = std::function<void(const PartOfMean& mean)>;
/// Lets `take` have a mean that lies complete in the pieces' `own`.
void give_mean(std::span<const Piece> pieces, const TakeMean& take);

class UnitMemory {
 public:
  virtual ~UnitMemory() = default;

  virtual std::string_view name() const = 0;
  /// The memory of this rank's chunk. Collective.
  virtual MemoryPtr add(const BufferPlan& plan) = 0;
  /// Bytes that the unit additionally takes on this rank while it is unsharded.
  virtual uint64_t unsharded_bytes(std::span<const Buffer> buffers) const = 0;
  /// Bytes that this rank receives when the unit is unsharded.
  virtual uint64_t gathered_bytes(std::span<const Buffer> buffers) const = 0;

  /// Starts to unshard the unit, which is unsharded when all returned work is done.
  virtual Works unshard(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) = 0;
  /// Divides the unsharded form among so many consecutive ranks while a unit is partly resharded. Collective.
  virtual void divide_after_forward(int ranks) = 0;
  /// Keeps this rank's part of the unsharded form: the next unshard() takes it from those ranks. Returns false if the unit is not to be
  /// divided like that, or if there is nothing to gain.
  virtual bool keep_part(std::span<const Buffer> buffers) = 0;
  virtual void drop_part() = 0;
  virtual uint64_t part_bytes() const = 0;

  /// Releases the unsharded form. `unsharding` is the work of an unshard() call if it was not waited for.
  virtual void reshard(std::span<const Buffer> buffers, Works unsharding) = 0;
  /// Moves the unsharded form into private memory, so that this rank may write it. The unit must be unsharded.
  virtual void make_private(std::span<const Buffer> buffers) = 0;

  /// This rank will not read this version again.
  virtual void done_reading(const Subject& subject) = 0;
  /// Waits until all ranks are done reading this version, so that this rank's chunk may change. Returns false if all ranks are waiting to
  /// write, each for another unit. The chunk may then only change in memory that other ranks do not read (see keep_copy).
  virtual bool wait_for_readers(const Subject& subject) = 0;
  /// From now on other ranks read a copy of the buffer's own chunk, which publish() makes. Returns false if they already do.
  virtual bool keep_copy(const Buffer& buffer) = 0;
  /// Makes this version of the own chunks readable by other ranks. `make_copy` says that the copies which they read have yet to be made.
  virtual void publish(std::span<const Buffer> buffers, const Subject& subject, bool make_copy) = 0;
  /// The copy of a buffer's own chunk that other ranks read. Undefined if they read the chunk itself.
  virtual at::Tensor published_copy(size_t buffer) const = 0;

  /// Whether gradient_buffers() waits for the sum of what was packed before, because there is no other memory to pack into.
  virtual bool packs_after_sum() const { return false; }
  /// Buffers to pack gradients into, not initialized.
  virtual GradientBuffers gradient_buffers(std::span<const GradientPlan> plans) = 0;
  /// Copies a gradient to its place in a buffer.
  virtual void pack(const at::Tensor& place, const at::Tensor& gradient) const { place.copy_(gradient); }
  /// Starts to compute the mean over all ranks of the buffers that gradient_buffers() returned last. This rank's part goes to the pieces'
  /// `own`.
  virtual Works reduce(std::span<const Piece> pieces, const Subject& subject, Reduce op = Reduce::Mean) = 0;
  /// The same for a mean that nobody keeps: `take` gets it from whoever waits for the work. The pieces' `own` are this rank's places in the
  /// buffers.
  virtual Works reduce(std::span<const Piece> pieces, const Subject& subject, TakeMean take) = 0;

  /// Abandons what was in progress. All ranks call it, inside tessera::recover. `again` takes back this rank's done_reading() for this
  /// version.
  virtual void start_anew(const Subject& subject, bool again) = 0;
};

/// Memory that an all-gather fills and that resharding frees. Works everywhere. `disk`: where the shards lie, if not in memory.
std::unique_ptr<UnitMemory> gathered_memory(Communicator shard, std::optional<DiskMemoryOptions> disk = {});

/// Memory that the ranks of one host share: their chunks lie in rank order, so a unit is unsharded without a copy. Returns null, and the
/// reason in `why_not`, if the ranks can't share memory. Collective.
std::unique_ptr<UnitMemory> node_shared_memory(Communicator shard, std::string& why_not);

/// The memory that ShardOptions::residence and TESSERA_RESIDENCE ask for. `decodes`: whether the codec decodes some of the unit's values.
/// Collective.
std::unique_ptr<UnitMemory> make_unit_memory(const ShardOptions& options, bool decodes, at::Device device);

}  // namespace tessera
