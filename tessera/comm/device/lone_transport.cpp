#include "tessera/comm/device/lone_transport.h"

#include <ATen/ATen.h>

#include <limits>

namespace tessera {
namespace {

bool same_place(const Piece& piece) {
  return piece.whole.const_data_ptr() == piece.own.const_data_ptr();
}

}  // namespace

Moved LoneTransport::all_gather(std::span<const Piece> pieces, std::span<at::Tensor> /*operands*/, const Launch& start) {
  start.inputs.block();
  for (const auto& piece : pieces) {
    if (!same_place(piece)) piece.whole.view_as(piece.own).copy_(piece.own);
  }
  return {.ready = Event::later(traits().device)};
}

Moved LoneTransport::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& start) {
  start.inputs.block();
  for (const auto& piece : pieces) {
    if (piece.squares) *piece.squares = std::numeric_limits<double>::quiet_NaN();
    if (!same_place(piece)) piece.own.view_as(piece.whole).copy_(piece.whole.to(*reduction.wire_dtype));
  }
  return {.ready = Event::later(traits().device)};
}

Moved LoneTransport::all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& start) {
  if (tensor.scalar_type() == *reduction.wire_dtype) return {};
  start.inputs.block();
  tensor.copy_(tensor.to(*reduction.wire_dtype));
  return {.ready = Event::later(traits().device)};
}

Moved LoneTransport::broadcast(const at::Tensor& /*tensor*/, int /*root*/, const Launch& /*start*/) {
  return {};
}

std::unique_ptr<Transport> LoneTransport::split(std::span<const int> /*colors*/, std::shared_ptr<Link> /*part*/, const Launch& /*start*/) {
  return std::make_unique<LoneTransport>(traits());
}

}  // namespace tessera
