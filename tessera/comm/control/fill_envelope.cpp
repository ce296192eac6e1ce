#include "tessera/comm/control/fill_envelope.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"

namespace tessera {
namespace {

/// Why a tensor can't be sent; empty if it can.
std::string complaint(const at::Tensor& tensor, std::string_view what, const GroupTraits& group) {
  if (!tensor.defined()) return fmt::format("{} is undefined", what);
  if (const auto device = group.device; tensor.device() != device) {
    return fmt::format("{} is on {}; transport {} moves {}", what, tensor.device().str(), group.name,
                       device.is_cpu() ? "host memory, pass a CPU tensor" : fmt::format("memory of {}, move it there, and a model before fully_shard", device.str()));
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
  if (overlap && own.data() != part_of(whole, static_cast<size_t>(rank), static_cast<size_t>(size)).data()) {
    return fmt::format("own overlaps whole, but does not lie at the place of rank {}", group.world_ranks[static_cast<size_t>(rank)]);
  }
  return {};
}

}  // namespace

void mix_into_layout(Envelope& envelope, int64_t number) {
  envelope.layout = (envelope.layout ^ static_cast<uint64_t>(number)) * 0x100000001b3ULL + 0x9e3779b97f4a7c15ULL;
}

Envelope envelope_for(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill) {
  Envelope envelope;
  envelope.operation = operation;
  envelope.number = call.subject.number;
  envelope.version = call.subject.version;
  envelope.members = call.subject.members;
  envelope.unit.assign_suffix(call.subject.unit);
  envelope.words.assign_prefix(call.subject.writer);
  envelope.call.assign_prefix(Calling::outermost());
  try {
    if (fill) fill(envelope);
  } catch (const std::exception& error) {
    envelope.refuse(first_line(error));
  }
  return envelope;
}

void describe(Envelope& envelope, const at::Tensor& tensor, const GroupTraits& group) {
  if (auto why = complaint(tensor, "the tensor", group); !why.empty()) throw UsageError(std::move(why));
  envelope.pieces = 1;
  envelope.numel = tensor.numel();
  envelope.dtype = envelope.wire_dtype = envelope.sum_dtype = static_cast<int8_t>(tensor.scalar_type());
}

void describe(Envelope& envelope, std::span<const Piece> pieces, const GroupTraits& group) {
  envelope.pieces = static_cast<int32_t>(pieces.size());
  for (size_t i = 0; i < pieces.size(); i++) {
    auto why = complaint(pieces[i], group);
    if (!why.empty()) throw UsageError("piece {}: {}", i, why);
    const auto& whole = pieces[i].whole;
    const auto dtype = static_cast<int8_t>(whole.scalar_type());
    if (i == 0) envelope.dtype = envelope.wire_dtype = envelope.sum_dtype = dtype;
    envelope.numel += whole.numel();
    mix_into_layout(envelope, whole.numel());
    mix_into_layout(envelope, dtype);
  }
}

void describe(Envelope& envelope, const Reduction& reduction) {
  envelope.reduce = static_cast<uint8_t>(reduction.op);
  envelope.wire_dtype = static_cast<int8_t>(*reduction.wire_dtype);
  envelope.sum_dtype = static_cast<int8_t>(*reduction.sum_dtype);
}

}  // namespace tessera
