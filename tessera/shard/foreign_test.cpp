// If another library has taken the dispatch key that sharded parameters need, the error names it. This is a program of its own, because a
// key can't be given back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/transports.h"

namespace {

void foreign(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&foreign>());
}

TEST(ForeignFallback, IsAnErrorByName) {
  using tessera::Communicator, tessera::UsageError, tessera::fully_shard, tessera::testing::message_of, tessera::testing::run_world;
  run_world({.transport = "self"}, [](const Communicator& world) {
    for (int attempt = 0; attempt < 2; attempt++) {
      const auto said = message_of<UsageError>([&] { fully_shard(torch::nn::Linear(2, 2), {.mesh = world}); });
      EXPECT_THAT(said, ::testing::HasSubstr("another library has taken libtorch's DeferredInit key"));
    }
  });
}

}  // namespace
