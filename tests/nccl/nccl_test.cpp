// The engine over NCCL, compiled and linked against a libtorch with CUDA. It may run where there is no GPU, and then says so by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/init.h"
#include "tests/testing/transports.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(Nccl, SaysThatThereIsNoGpu) {
  if (devices_here(c10::kCUDA) > 0) GTEST_SKIP() << "here are GPUs";
  // libtessera.so is built without NCCL. This program's own connect.cpp takes its place, because symbols of a program come before those of
  // the libraries that it loads.
  EXPECT_EQ(engine_named("nccl").why_not(), "no GPU here");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(testing::message_of<ConfigError>([&] { init(store, 0, 1, {.transport = "nccl"}); }),
              HasSubstr("device cuda: there is none here: "));
}

}  // namespace
}  // namespace tessera
