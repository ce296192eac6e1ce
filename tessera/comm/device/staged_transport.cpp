#include "tessera/comm/device/staged_transport.h"

#include <ATen/ATen.h>

#include "tessera/base/pinned_memory.h"

namespace tessera {
namespace {

GroupTraits on_device(GroupTraits traits, c10::Device device) {
  traits.device = device;
  return traits;
}

at::Tensor staging(const at::Tensor& like) {
  return empty_pinned(like.sizes(), like.scalar_type(), like.device());
}

/// Copies the values to host memory, and returns when they are there.
at::Tensor staged(const at::Tensor& values) {
  return staging(values).copy_(values);
}

void unstage(const at::Tensor& values, const at::Tensor& to) {
  to.copy_(values, /*non_blocking=*/true);
}

}  // namespace

StagedTransport::StagedTransport(c10::Device device, std::unique_ptr<Transport> host)
    : Transport(on_device(host->traits(), device)), host_(std::move(host)), queue_(device) {}

Moved StagedTransport::all_gather(std::span<const Piece> pieces, std::span<at::Tensor> /*operands*/, const Launch& start) {
  return queue_.run(start, [&] {
    std::vector<Piece> on_host;
    for (const auto& piece : pieces) on_host.push_back({.whole = staging(piece.whole), .own = staged(piece.own)});
    const auto bytes = host_->all_gather(on_host, {}, start).bytes;
    for (size_t i = 0; i < pieces.size(); i++) {
      unstage(on_host[i].whole, pieces[i].whole);
      queue_.uses(pieces[i].whole);
    }
    return bytes;
  });
}

Moved StagedTransport::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& start) {
  return queue_.run(start, [&] {
    std::vector<Piece> on_host;
    for (const auto& piece : pieces) {
      on_host.push_back({.whole = staged(piece.whole.to(*reduction.wire_dtype)), .own = staging(piece.own), .squares = piece.squares});
    }
    const auto bytes = host_->reduce_scatter(on_host, reduction, start).bytes;
    for (size_t i = 0; i < pieces.size(); i++) {
      unstage(on_host[i].own, pieces[i].own);
      queue_.uses(pieces[i].own);
    }
    return bytes;
  });
}

Moved StagedTransport::all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& start) {
  return queue_.run(start, [&] {
    const auto on_host = staged(tensor);
    const auto bytes = host_->all_reduce(on_host, reduction, start).bytes;
    unstage(on_host, tensor);
    queue_.uses(tensor);
    return bytes;
  });
}

Moved StagedTransport::broadcast(const at::Tensor& tensor, int root, const Launch& start) {
  return queue_.run(start, [&] {
    const bool sends = traits().local_ranks.front() == root;
    const auto on_host = sends ? staged(tensor) : staging(tensor);
    const auto bytes = host_->broadcast(on_host, root, start).bytes;
    if (!sends) unstage(on_host, tensor);
    queue_.uses(tensor);
    return bytes;
  });
}

std::unique_ptr<Transport> StagedTransport::split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& start) {
  return std::make_unique<StagedTransport>(traits().device, host_->split(colors, std::move(part), start));
}

}  // namespace tessera
