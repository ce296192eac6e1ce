#include "tessera/shard/memory/kept_part.h"

#include <ATen/ATen.h>

#include <vector>

namespace tessera {

Communicator consecutive_ranks(const Communicator& shard, int ranks) {
  std::vector<int> colors;
  for (int rank = 0; rank < shard.size(); rank++) colors.push_back(rank / ranks);
  return shard.part(colors);
}

namespace {

at::Tensor unsharded_values(const Buffer& buffer) {
  return buffer.unsharded->memory_view(buffer.unsharded_dtype());
}

}  // namespace

KeptPart::KeptPart(const Communicator& shard, int ranks) : few_(consecutive_ranks(shard, ranks)) {}

void KeptPart::keep(std::span<const Buffer> buffers) {
  for (const auto& buffer : buffers) parts_.push_back(few_.own_chunk(unsharded_values(buffer)).clone());
}

uint64_t KeptPart::bytes() const {
  uint64_t bytes = 0;
  for (const auto& part : parts_) bytes += part.nbytes();
  return bytes;
}

Works KeptPart::fill(std::span<const Buffer> buffers, const Subject& subject, const Fault& fault) const {
  for (const auto& buffer : buffers) buffer.unsharded->allocate(subject.unit);
  Works works;
  size_t next = 0;
  for_each_group(
      buffers, [](const Buffer& buffer) { return buffer.unsharded_dtype(); },
      [&](std::span<const Buffer> run) {
        c10::SmallVector<Piece, 2> pieces;
        for (const auto& buffer : run) pieces.push_back({.whole = unsharded_values(buffer), .own = parts_[next++]});
        works.push_back(few_.all_gather(pieces, subject, fault.operands));
      });
  return works;
}

}  // namespace tessera
