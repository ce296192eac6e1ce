// A world whose ranks are the replicas of the silent device: one process stands for all of them, as on an engine that traces. Its
// collectives move values between replicas where they lie, and it writes down what it was asked for.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

struct Trace {
  struct Companion {
    std::vector<int64_t> sizes;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> in_its_place;  // an equal value
  };
  struct Step {
    Operation operation;
    std::string unit;
    size_t pieces = 0;
    std::vector<Companion> companions = {};
    std::thread::id thread = std::this_thread::get_id();
  };
  std::vector<Step> calls;
  int steps_done = 0;

  /// The calls of one kind.
  std::vector<Step> of(Operation operation) const;
};

struct TracingWorld {
  Communicator world;
  std::shared_ptr<Trace> trace;  // of the world and of every group that is split from it
};

/// kReplicas ranks.
TracingWorld tracing_world();

}  // namespace tessera::testing
