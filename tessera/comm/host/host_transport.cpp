#include "tessera/comm/host/host_transport.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"

namespace tessera {
namespace {

// Up to this many values, counted over all ranks, all_reduce sends everything to all ranks: one exchange instead of two.
constexpr size_t kSmallReduction = 32 * 1024;

/// One element for each rank.
template <class T>
using OfRanks = c10::SmallVector<T, 8>;

}  // namespace

Moved HostTransport::run(const Request& request, const Launch& start) {
  Moved moved;
  for (const auto& piece : request.pieces) move(request, piece, start, moved);
  return moved;
}

void HostTransport::move(const Request& request, const Piece& piece, const Launch& start, Moved& moved) {
  const auto& reduction = request.reduction;
  const auto ranks = size();
  if (request.operation == Operation::ReduceScatter) {
    const auto outgoing = piece.whole.to(*reduction.wire_dtype);
    const auto all = bytes_of(outgoing);
    OfRanks<ConstBytes> to(ranks);
    for (size_t r = 0; r < ranks; r++) to[r] = part_of(all, r, ranks);
    if (piece.squares) *piece.squares = 0;
    return reduce(reduction, to, piece.own.view({-1}), start, piece.squares.get(), moved);
  }
  const auto whole = bytes_of(piece.whole);
  OfRanks<Bytes> from(ranks);
  if (request.operation == Operation::AllGather) {
    for (size_t r = 0; r < ranks; r++) from[r] = part_of(whole, r, ranks);
    return gather(bytes_of(piece.own), from, request.whole_of, start, moved);
  }
  if (request.operation == Operation::Broadcast) {
    from[request.root] = whole;
    return gather(link_->rank() == request.root ? whole : Bytes(), from, Among::Group, start, moved);
  }
  const auto& tensor = piece.whole;
  const auto outgoing = tensor.to(*reduction.wire_dtype);
  const ConstBytes sent = bytes_of(outgoing);
  const auto numel = static_cast<size_t>(tensor.numel());
  OfRanks<ConstBytes> to(ranks);
  if (numel * ranks <= kSmallReduction) {
    const auto received = at::empty({link_->size(), tensor.numel()}, outgoing.options());
    const auto all = bytes_of(received);
    for (size_t r = 0; r < ranks; r++) to[r] = from[r] = part_of(all, r, ranks);
    gather(sent, from, Among::Group, start, moved);
    return Reducer(reduction).reduce(to, tensor, traits().topology);
  }
  // Each rank reduces a chunk, then all ranks gather the results. The sums have the same bits as in the branch above.
  const size_t chunk = (numel + ranks - 1) / ranks, sent_chunk = chunk * outgoing.element_size(), own_chunk = chunk * tensor.element_size();
  for (size_t r = 0; r < ranks; r++) to[r] = byte_range(sent, r * sent_chunk, sent_chunk);
  const auto begin = std::min(rank() * chunk, numel);
  const auto own = tensor.view({-1}).narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(std::min(chunk, numel - begin)));
  reduce(reduction, to, own, start, nullptr, moved);
  for (size_t r = 0; r < ranks; r++) from[r] = byte_range(whole, r * own_chunk, own_chunk);
  gather(from[rank()], from, Among::Group, start, moved);
}

std::unique_ptr<Transport> HostTransport::split(std::span<const int> colors, std::shared_ptr<Link> part) {
  auto of_part = with_ranks_of(*part, traits(), colors);
  return std::make_unique<HostTransport>(std::move(of_part), std::move(part));
}

void HostTransport::reduce(const Reduction& reduction, std::span<const ConstBytes> to, const at::Tensor& own, const Launch& start,
                           double* squares, Moved& moved) {
  const Reducer reducer(reduction);
  const auto width = c10::elementSize(*reduction.wire_dtype);
  link_->all_to_all(
      to,
      [&](size_t begin, std::span<const ConstBytes> rows) {
        if (rows.front().size() < width) return;  // this rank's part has ended; the parts of other ranks are longer
        const auto values = own.narrow(0, static_cast<int64_t>(begin / width), static_cast<int64_t>(rows.front().size() / width));
        reducer.reduce(rows, values, traits().topology, squares);
      },
      start.end);
  for (size_t r = 0; r < to.size(); r++) count(moved, static_cast<int>(r), to[r].size());
}

void HostTransport::gather(ConstBytes own, std::span<const Bytes> from, Among /*whole_of*/, const Launch& start, Moved& moved) {
  link_->all_gather(own, from, start.end);
  for (size_t r = 0; r < from.size(); r++) count(moved, static_cast<int>(r), own.size());
}

void HostTransport::count(Moved& moved, int to, size_t bytes) const {
  if (to == link_->rank()) return;
  moved.bytes += bytes;
  if (traits().topology.host_of(to) != traits().topology.host_of(link_->rank())) moved.across += bytes;
}

}  // namespace tessera
