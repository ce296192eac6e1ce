// Runs ranks over any transport as threads of the test process, so that one test body covers all transports.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

inline constexpr auto kTestLimit = std::chrono::seconds(5);

struct World {
  std::string transport;
  int ranks = 1;
  std::vector<int> host_of = {};  // for threads and gloo: the number of each rank's host; one host if empty
  friend std::ostream& operator<<(std::ostream& out, const World& world) {
    out << world.transport << "_" << world.ranks;
    for (size_t r = 0; r < world.host_of.size(); r++) out << (r == 0 ? "_on_" : "") << world.host_of[r];
    return out;
  }
};

/// Every transport with 1, 2, 3, 4 and 7 ranks, except that `self` has only one.
std::vector<World> all_worlds();
/// The worlds of several real ranks, some of them over two levels.
std::vector<World> talking_worlds();

/// Runs `program` once for each rank, in one thread each. Throws the first failure, with its rank. In a simulated world (`fake`) it runs
/// only the last rank.
void run_world(const World& world, const std::function<void(Communicator)>& program, std::chrono::milliseconds limit = kTestLimit);

/// The message of the exception that `act` throws. Fails the test if it throws nothing or another kind of exception.
template <class E, class Act>
std::string message_of(Act&& act) {
  try {
    act();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an error of another kind: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "an error was due, but none came";
  return {};
}

}  // namespace tessera::testing
