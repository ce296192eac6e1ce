// A world whose ranks are the replicas of the silent device, so that one process represents all ranks, as with a transport that traces. Its
// collectives move values between replicas, and every call is recorded in a Trace.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

struct Trace {
  struct Operand {
    std::vector<int64_t> sizes;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> in_its_place;  // the tensor that replaced it
  };
  struct Step {
    Operation operation;
    std::string unit;
    size_t pieces = 0;
    std::vector<Operand> operands = {};
    std::thread::id thread = std::this_thread::get_id();
  };
  std::vector<Step> calls;
  int steps_done = 0;

  /// The calls of one operation.
  std::vector<Step> of(Operation operation) const;
};

struct TracingWorld {
  Communicator world;
  std::shared_ptr<Trace> trace;  // shared by the world and all groups that are split from it
};

/// Makes a world of kReplicas ranks.
TracingWorld tracing_world();

}  // namespace tessera::testing
