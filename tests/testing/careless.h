// An engine that forgets a duty, so that tests see whether anybody notices.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/c10d/collectives.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/control/group.h"
#include "tessera/comm/self/loopback_link.h"
#include "tests/testing/delayed_device.h"

namespace tessera::testing {

/// The duties that an engine can forget.
enum class Forgets { Nothing, Inputs, Results, Memory };

class Careless final : public Transport {
 public:
  /// Calls `before` ahead of each all_reduce, after all ranks have agreed about it.
  Careless(
      std::unique_ptr<Transport> careful, Forgets forgets, std::function<void()> before = [] {})
      : Transport(careful->traits()), careful_(std::move(careful)), forgets_(forgets), before_(std::move(before)) {}

  Moved all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands, const Launch& launch) override {
    return forget(launch, [&](const Launch& own) { return careful_->all_gather(pieces, operands, own); });
  }
  Moved reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& launch) override {
    return forget(launch, [&](const Launch& own) { return careful_->reduce_scatter(pieces, reduction, own); });
  }
  Moved all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& launch) override {
    before_();
    return careful_->all_reduce(tensor, reduction, launch);
  }
  Moved broadcast(const at::Tensor& tensor, int root, const Launch& launch) override { return careful_->broadcast(tensor, root, launch); }
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& launch) override {
    return careful_->split(colors, std::move(part), launch);
  }

 private:
  template <class Run>
  Moved forget(Launch launch, const Run& run) const {
    if (forgets_ == Forgets::Inputs) launch.inputs = {};
    set_keeps_memory(forgets_ != Forgets::Memory);
    auto moved = run(launch);
    set_keeps_memory(true);
    if (forgets_ == Forgets::Results) moved.ready = {};
    return moved;
  }

  const std::unique_ptr<Transport> careful_;
  const Forgets forgets_;
  const std::function<void()> before_;
};

inline constexpr int kDelayedRanks = 2;

/// Rank 0 of `ranks` on the delayed device. The other ranks do what this one does.
inline Communicator world_on_delayed_device(Forgets forgets, int ranks = kDelayedRanks) {
  auto link = std::make_shared<LoopbackLink>(0, all_ranks(ranks));
  auto transport = std::make_unique<CollectivesTransport>(GroupTraits{.name = "delayed", .device = delayed_device(), .sums = SumOrder::Any},
                                                          link, delayed_backend(0, ranks), nullptr);
  return Communicator(std::make_shared<Group>(std::make_unique<Careless>(std::move(transport), forgets), link));
}

}  // namespace tessera::testing
