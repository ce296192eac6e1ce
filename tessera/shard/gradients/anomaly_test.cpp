// Gradients with inf or NaN: the norm names the parameters, and TESSERA_DETECT_ANOMALY the rank on which they arise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/log.h"
#include "tessera/base/process.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/child_task.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"

namespace tessera::testing::anomaly_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs a step in which rank 1 gets values that are not finite behind the layer `b`. Returns the logged lines.
std::vector<std::string> logged_in_a_bad_step() {
  std::vector<std::string> lines;
  std::mutex mutex;
  set_log_sink([&](const LogRecord& record) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(record.text);
  });
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const auto a = net->a(input(world.rank()));
    const auto hidden = net->b(torch::tanh(a)) * (world.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 1);
    (net->c(torch::tanh(hidden.detach())).sum() + hidden.sum()).backward();
    EXPECT_TRUE(std::isnan(grad_norm(parameters(*net)).item<double>()));
  });
  set_log_sink({});
  return lines;
}

const ChildTask in_anomaly("a bad step", [](const std::string&) {
  for (const auto& line : logged_in_a_bad_step()) std::printf("%s\n", line.c_str());
  return 0;
});

TEST(Anomaly, TheNormNamesTheParameters) {
  if (!on_cpu()) GTEST_SKIP() << "on a device it would make the host wait";
  const auto lines = logged_in_a_bad_step();
  EXPECT_THAT(lines, Contains(AllOf(HasSubstr("the norm of the gradients is nan"), HasSubstr("'b.weight'"))));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("before it is averaged"))));
}

TEST(Anomaly, TheRankIsNamedOnRequest) {
  Process child({this_program()}, in_anomaly.environment({}, {{"TESSERA_DETECT_ANOMALY", "1"}}), Process::Output::Capture);
  const auto said = child.read_output();
  EXPECT_EQ(child.wait(std::chrono::seconds(20)), 0) << said;
  EXPECT_THAT(said,
              HasSubstr("rank 1: the gradient of 'b.weight', unit 'b', has 100 NaN and 0 inf among 100 values before it is averaged"));
  EXPECT_THAT(said, HasSubstr("rank 1: the gradient of 'c.weight'"));
  EXPECT_THAT(said, Not(HasSubstr("rank 0: the gradient of")));
}

}  // namespace
}  // namespace tessera::testing::anomaly_test
