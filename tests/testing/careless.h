// Careless: an engine that forgets a duty. With it, tests show that they notice such an engine.
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
  /// Calls `before` before each all_reduce, once all ranks have agreed on the operation.
  Careless(
      std::unique_ptr<Transport> careful, Forgets forgets, std::function<void()> before = [] {})
      : Transport(careful->traits()), careful_(std::move(careful)), forgets_(forgets), before_(std::move(before)) {}

  Moved run(const Request& request, const Launch& launch) override {
    if (request.has_parts()) return forget(request, launch);
    if (request.operation == Operation::AllReduce) before_();
    return careful_->run(request, launch);
  }
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override {
    return careful_->split(colors, std::move(part));
  }

 private:
  Moved forget(const Request& request, Launch launch) const {
    if (forgets_ == Forgets::Inputs) launch.inputs = {};
    set_keeps_memory(forgets_ != Forgets::Memory);
    auto moved = careful_->run(request, launch);
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
