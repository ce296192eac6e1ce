// Thousands of random operations with random delays, the same on every rank, to find errors that need a rare order of events.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/testing/transports.h"

namespace tessera::testing::stress_long_test {
namespace {

class Stress : public ::testing::TestWithParam<World> {};

TEST_P(Stress, RandomScriptsGiveRightSums) {
  run_world(
      GetParam(),
      [](const Communicator& world) {
        std::mt19937 script(17);                                          // the same on every rank
        std::mt19937 mood(static_cast<unsigned>(world.rank()) * 97 + 1);  // its own
        const auto ranks = static_cast<double>(world.size());
        std::vector<std::pair<Work, std::pair<at::Tensor, double>>> under_way;
        for (int i = 0; i < 2000; i++) {
          if (mood() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mood() % 2000));
          const auto numel = static_cast<int64_t>(script() % 5000);
          const double value = static_cast<double>(script() % 100) + 1;
          if (script() % 2 == 0) {
            const auto tensor = at::full({numel}, value, at::kDouble);
            under_way.push_back({world.all_reduce(tensor), {tensor, value * ranks}});
          } else {
            const Piece piece{.whole = at::zeros({numel * world.size()}, at::kDouble), .own = at::full({numel}, value, at::kDouble)};
            under_way.push_back({world.all_gather(std::array{piece}), {piece.whole, value}});
          }
          if (script() % 8 != 0) continue;
          for (const auto& [work, result] : under_way) {
            work.wait();
            ASSERT_TRUE(result.first.eq(result.second).all().item<bool>()) << "operation " << i;
          }
          under_way.clear();
        }
        world.barrier();
      },
      std::chrono::minutes(2));
}

INSTANTIATE_TEST_SUITE_P(Worlds, Stress, ::testing::ValuesIn(talking_worlds()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::testing::stress_long_test
