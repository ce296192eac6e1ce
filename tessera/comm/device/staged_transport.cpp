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

}  // namespace

StagedTransport::StagedTransport(c10::Device device, std::unique_ptr<Transport> host)
    : Transport(on_device(host->traits(), device)), host_(std::move(host)), queue_(device) {}

Moved StagedTransport::run(const Request& request, const Launch& start) {
  return queue_.run(start, [&] {
    const auto operation = request.operation;
    const bool scatters = operation == Operation::ReduceScatter, is_root = traits().local_ranks.front() == request.root;
    const bool reads_whole = operation != Operation::AllGather && (operation != Operation::Broadcast || is_root);
    auto on_host = request;
    for (auto& [whole, own, squares] : on_host.pieces) {
      whole = reads_whole ? staged(scatters ? whole.to(*request.reduction.wire_dtype) : whole) : staging(whole);
      own = !request.has_parts() ? whole : scatters ? staging(own) : staged(own);
    }
    auto moved = host_->run(on_host, start);
    for (size_t i = 0; i < request.pieces.size(); i++) {
      const auto result = scatters ? &Piece::own : &Piece::whole;
      const auto& target = request.pieces[i].*result;
      if (operation != Operation::Broadcast || !is_root) target.copy_(on_host.pieces[i].*result, /*non_blocking=*/true);
      queue_.uses(target);
    }
    return moved;
  });
}

std::unique_ptr<Transport> StagedTransport::split(std::span<const int> colors, std::shared_ptr<Link> part) {
  return std::make_unique<StagedTransport>(traits().device, host_->split(colors, std::move(part)));
}

}  // namespace tessera
