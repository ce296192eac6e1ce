// Transport: the interface by which an engine moves the data of collectives. Group does the rest: agreement, time limits, and the same
// error on all ranks.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/base/event.h"
#include "tessera/comm/operation.h"
#include "tessera/comm/traits.h"

namespace tessera {

class Link;

/// How an operation starts.
struct Launch {
  std::string_view unit;                           // the unit that the operation is about; valid only during the call
  Event inputs = {};                               // on a device, the operation runs after this point of the caller's stream
  std::chrono::steady_clock::time_point end = {};  // when the operation must have ended
};

/// The result of an operation. On the host the operation has ended; on a device the results are ready after the event.
struct Moved {
  uint64_t bytes = 0;   // how many were sent to other ranks
  uint64_t across = 0;  // how many of these to ranks on other hosts
  Event ready = {};
};

/// Implemented once per engine. A Group calls it from one thread, with the same arguments on every rank, after all ranks have agreed. A
/// failure is a LinkFailure, or any other exception, and ends the group. A size of one is not a special case.
class Transport {
 public:
  explicit Transport(GroupTraits traits) : traits_(std::move(traits)) {
    if (traits_.world_ranks.empty()) traits_.world_ranks = all_ranks(traits_.size);
  }
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  /// All pieces have one dtype, and tensors are contiguous. Both dtypes of a reduction are set.
  virtual Moved run(const Request& request, const Launch& start) = 0;

  /// Ranks with equal numbers in `colors`, one per rank, form a new group, in the order of their ranks. `part` is the new group's link, or
  /// null if this group has no link.
  virtual std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) = 0;

  /// The value that each local rank sees; from_replicas is the inverse. One value on engines with one rank per process.
  virtual std::vector<at::Tensor> replicas(const at::Tensor& tensor) { return {tensor}; }
  virtual at::Tensor from_replicas(std::span<const at::Tensor> tensors) { return tensors.front(); }

  /// Marks the end of a training step, where a tracing engine ends its program.
  virtual void step_done() {}

  /// Ends the operations that are under way on a device. Any thread may call it.
  virtual void abort(std::string_view /*reason*/) noexcept {}

  const GroupTraits& traits() const { return traits_; }

 private:
  GroupTraits traits_;
};

}  // namespace tessera
