// The engine over a c10d backend's own collectives trains as any other, to rounding: its sums have no defined order.
#include <gtest/gtest.h>

#include "gpt.h"
#include "tests/testing/transports.h"

namespace tessera::testing::collectives_engine_test {
namespace {

checkpoint::StateDict trained_over(const std::string& transport, int ranks) {
  checkpoint::StateDict found;
  run_world({.transport = transport, .ranks = ranks}, [&](const Communicator& world) {
    auto values = trained_gpt(world);
    if (!world.is_first()) return;
    EXPECT_GT(world.traffic(Operation::AllGather).bytes, 0);
    found = std::move(values);
  });
  return found;
}

TEST(CollectivesEngine, TrainsTheGptToRounding) {
  for (const int ranks : {2, 3}) {
    const auto expected = trained_over("threads", ranks), found = trained_over("gloo_collectives", ranks);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [name, value] : expected) EXPECT_TRUE(at::allclose(found.at(name), value, 1e-4, 1e-5)) << name;
  }
}

}  // namespace
}  // namespace tessera::testing::collectives_engine_test
