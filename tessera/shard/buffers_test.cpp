// Synchronizing the buffers of all ranks.
#include "tessera/shard/buffers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/testing/net.h"

namespace tessera::testing::buffers_test {
namespace {

TEST(Buffers, GetTheValuesThatTheCallerAsksFor) {
  with_ranks(3, [](const Communicator& world) {
    torch::nn::BatchNorm1d norm(2);
    const auto mean_of = [&](BufferSync sync) {
      norm->running_mean.fill_(world.rank());
      sync_buffers(*norm, world, sync);
      return norm->running_mean[1].item<float>();
    };
    EXPECT_EQ(mean_of(BufferSync::Rank0), 0);
    EXPECT_EQ(mean_of(BufferSync::Mean), 1);
    EXPECT_EQ(mean_of(BufferSync::None), world.rank());
  });
}

}  // namespace
}  // namespace tessera::testing::buffers_test
