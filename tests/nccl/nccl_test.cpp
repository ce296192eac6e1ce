// The engine over NCCL, compiled and linked against a libtorch with CUDA. It may run where there is no GPU, and then says so by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/nccl.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/init.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "none";
}

TEST(Nccl, SaysThatThereIsNoGpu) {
  if (gpus_here() > 0) GTEST_SKIP() << "here are GPUs";
  // The table of engines has what this program links, not the library's own rows.
  EXPECT_EQ(engine_named("nccl").why_not(), "no GPU here");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of([&] { init(store, 0, 1, {.transport = "nccl"}); }),
              HasSubstr("transport nccl: rank 0 of this host has no GPU of its own"));
}

}  // namespace
}  // namespace tessera
