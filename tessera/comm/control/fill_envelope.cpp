#include "tessera/comm/control/fill_envelope.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"

namespace tessera {
namespace {

/// Why a tensor can't be sent; empty if it can.
std::string complaint(const at::Tensor& tensor, std::string_view what, const GroupTraits& group) {
  if (!tensor.defined()) return fmt::format("{} is undefined", what);
  if (const auto device = group.device; tensor.device() != device) {
    return fmt::format("{} is on {}; transport {} moves {}", what, tensor.device().str(), group.name,
                       device.is_cpu() ? "host memory; pass a CPU tensor"
                                       : fmt::format("memory of {}; move the tensor there, or a model before fully_shard", device.str()));
  }
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) return fmt::format("{} is not contiguous; pass .contiguous()", what);
  bytes_of(tensor);  // throws if the memory can't be accessed
  return {};
}

std::string complaint(const Piece& piece, const GroupTraits& group) {
  if (auto why = complaint(piece.whole, "whole", group); !why.empty()) return why;
  if (auto why = complaint(piece.own, "own", group); !why.empty()) return why;
  const int rank = group.local_ranks.front(), size = group.size;
  if (piece.whole.numel() != piece.own.numel() * size) {
    return fmt::format("whole has {} elements, but {} ranks with own parts of {} make {}", piece.whole.numel(), size, piece.own.numel(),
                       piece.own.numel() * size);
  }
  const auto whole = bytes_of(piece.whole), own = bytes_of(piece.own);
  // Addresses on devices may not be real, so there only tensors of one storage can overlap.
  const bool same_memory = piece.whole.is_cpu() || piece.whole.is_alias_of(piece.own);
  const bool overlap = same_memory && !own.empty() && own.data() < whole.data() + whole.size() && whole.data() < own.data() + own.size();
  if (overlap && own.data() != part_of(whole, rank, size).data()) {
    return fmt::format("own overlaps whole, but is not at the place of rank {} in it", group.world_ranks[rank]);
  }
  return {};
}

}  // namespace

Envelope envelope_for(Operation operation, const Subject& subject, c10::function_ref<void(Envelope&)> fill, bool is_alone) {
  Envelope envelope;
  envelope.operation = operation;
  envelope.number = subject.number;
  envelope.version = subject.version;
  envelope.members = subject.members;
  envelope.unit.assign_suffix(subject.unit);
  envelope.words.assign_prefix(subject.writer);
  envelope.call.assign_prefix(Calling::outermost());
  try {
    if (fill) fill(envelope);
  } catch (const std::exception& error) {
    const auto why = first_line(error);
    if (is_alone) throw UsageError("{}{}: {}", name(operation), subject.unit.empty() ? "" : fmt::format(" of '{}'", subject.unit), why);
    envelope.refuse(why);
  }
  return envelope;
}

void describe(Envelope& envelope, std::span<const Piece> pieces, const GroupTraits& group, bool have_parts) {
  envelope.pieces = static_cast<int32_t>(pieces.size());
  for (size_t i = 0; i < pieces.size(); i++) {
    const auto& whole = pieces[i].whole;
    if (auto why = have_parts ? complaint(pieces[i], group) : complaint(whole, "the tensor", group); !why.empty())
      throw UsageError("{}{}", have_parts ? fmt::format("piece {}: ", i) : "", why);
    const auto dtype = static_cast<int8_t>(whole.scalar_type());
    if (i == 0) envelope.dtype = envelope.wire_dtype = envelope.sum_dtype = dtype;
    envelope.numel += whole.numel();
    envelope.mix_into_layout(whole.numel());
    envelope.mix_into_layout(dtype);
  }
}

void describe(Envelope& envelope, const Reduction& reduction) {
  envelope.reduce = static_cast<uint8_t>(reduction.op);
  envelope.wire_dtype = static_cast<int8_t>(*reduction.wire_dtype);
  envelope.sum_dtype = static_cast<int8_t>(*reduction.sum_dtype);
}

void describe(Envelope& envelope, Request& request, const GroupTraits& group) {
  const auto& pieces = request.pieces;
  describe(envelope, pieces, group, request.has_parts());
  if (pieces.empty()) return;
  const auto dtype = pieces.front().whole.scalar_type();
  const auto other = std::ranges::find_if(pieces, [&](const Piece& piece) { return piece.whole.scalar_type() != dtype; });
  if (other != pieces.end()) throw UsageError("piece {}: pieces of one call must have one dtype", other - pieces.begin());
  if (request.operation == Operation::AllGather) {
    const auto differs = [&](const Piece& piece) { return piece.own.scalar_type() != dtype; };
    if (std::ranges::any_of(pieces, differs)) throw UsageError("own and whole differ in dtype");
  } else if (request.operation == Operation::Broadcast) {
    if (request.root < 0 || request.root >= group.size)
      throw UsageError("rank {} does not exist in a group of {}", request.root, group.size);
    envelope.root = group.world_ranks[request.root];
  } else {
    request.reduction = resolved(request.reduction, pieces.front().whole);
    describe(envelope, request.reduction);
    expect_reducible(request.reduction, dtype, pieces);
  }
}

}  // namespace tessera
