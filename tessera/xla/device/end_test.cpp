// A process ends well while a program still runs on its device. A failure is a crash of this test program at its end.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tessera/xla/init.h"

namespace tessera::xla::end_test {
namespace {

TEST(Process, EndsWhileAProgramRuns) {
  const auto world = init({.devices = 2});
  auto x = torch::ones({1024, 1024}, torch::TensorOptions(world.traits().device)) / 1024;
  const auto more = [&] {
    for (int i = 0; i < 8; i++) x = x.matmul(x);
    step_boundary();
  };
  more();
  EXPECT_EQ(x[0][0].item<float>(), 1.0F / 1024);
  std::thread(more).join();
  for (int program = 0; program < 4; program++) more();
}

}  // namespace
}  // namespace tessera::xla::end_test
