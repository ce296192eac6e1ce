// Ranks as threads of one process: where tests live, and a mode of its own for small machines.
#pragma once

#include <functional>

#include "tessera/comm/communicator.h"

namespace tessera {

struct ThreadOptions {
  std::chrono::milliseconds limit = kOperationLimit;
  std::vector<int> host_of = {};  // simulates several hosts: one number for each rank
};

/// Runs `program` in `size` threads, each with its rank of one world, and returns when all have ended. If one throws, the others are
/// woken with an error, and the first failure is thrown here with its rank before the message.
///
/// libtorch has one default random generator per process: threads draw from it in an order that changes from run to run. Programs
/// that draw numbers while they train (dropout) need generators of their own, or ranks that are processes.
void run_ranks(int size, const std::function<void(Communicator world)>& program, const ThreadOptions& options = {});

}  // namespace tessera
