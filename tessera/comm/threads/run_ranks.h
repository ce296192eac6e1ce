// Ranks as threads of one process, for tests and for small machines.
#pragma once

#include <functional>
#include <optional>

#include "tessera/comm/communicator.h"

namespace tessera {

struct ThreadOptions {
  std::chrono::milliseconds limit = kOperationLimit;
  /// Simulates several hosts: host_of[r] is the number of rank r's host. If a host has several ranks, data moves over two levels.
  std::vector<int> host_of = {};
  /// The device of the ranks' tensors; that of TESSERA_DEVICE unless given. All ranks share it, and their data goes through host memory.
  std::optional<c10::Device> device = {};
};

/// Runs `program` in `size` threads, one for each rank of a world, and returns when all have ended. If a rank throws, the other ranks get
/// an error when they wait, and run_ranks throws the first failure with its rank before the message.
///
/// libtorch has one default random generator per process, from which the threads draw in an order that changes from run to run. Programs
/// that draw numbers while they train (dropout) need a generator for each rank, or ranks that are processes. On a device, backward runs in
/// the thread of each rank, because libtorch's own thread for the device would wait, in the backward pass of one rank, for work that it has
/// to do for another.
void run_ranks(int size, const std::function<void(Communicator world)>& program, const ThreadOptions& options = {});

}  // namespace tessera
