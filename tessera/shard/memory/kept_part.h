// KeptPart: this rank's part of a partly resharded unit (an integer reshard_after_forward). A few ranks together keep the unsharded form,
// and all-gather it among themselves.
#pragma once

#include "tessera/shard/memory/unit_memory.h"

namespace tessera {

/// Returns this rank's group when a shard group is divided into groups of `ranks` consecutive ranks. Only the first call is collective.
Communicator consecutive_ranks(const Communicator& shard, int ranks);

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
  Works fill(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) const;

 private:
  Communicator few_;
  c10::SmallVector<at::Tensor, 2> parts_;  // one for each buffer
};

}  // namespace tessera
