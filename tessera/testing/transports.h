// Ranks over any transport as threads of the test process, so that one test body serves all of them.
#pragma once

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
  friend std::ostream& operator<<(std::ostream& out, const World& world) { return out << world.transport << "_" << world.ranks; }
};

/// Every transport with 1, 2, 3, 4 and 7 ranks (self with one).
std::vector<World> all_worlds();
/// Those in which several ranks really talk.
std::vector<World> talking_worlds();

/// Runs `program` once for each rank, in threads that talk over the transport; the first failure is thrown with its rank. On paper there
/// is one thread, playing the last rank.
void run_world(const World& world, const std::function<void(Communicator)>& program, std::chrono::milliseconds limit = kTestLimit);

/// The exception that `act` throws, as its message; fails the test if it is of another kind or does not come.
template <class E, class Act>
std::string message_of(Act&& act);

}  // namespace tessera::testing

#include <gtest/gtest.h>

template <class E, class Act>
std::string tessera::testing::message_of(Act&& act) {
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
