// Synchronizing the buffers of all ranks.
#include "tessera/shard/buffers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/deferred_init.h"
#include "tests/testing/net.h"

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

TEST(Buffers, OfIntegersAreThoseOfTheFirstRankWhereOthersBecomeTheirMean) {
  with_ranks(2, [](const Communicator& world) {
    torch::nn::BatchNorm1d norm(2);
    norm->num_batches_tracked.fill_(world.rank() + 5);
    sync_buffers(*norm, world, BufferSync::Mean);
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 5);
  });
}

TEST(Buffers, ThatHaveNoValuesAreNamedOnAllRanks) {
  with_ranks(2, [](const Communicator& world) {
    const auto norm = deferred_init([] { return std::make_shared<torch::nn::BatchNorm1dImpl>(2); });
    EXPECT_THAT(message_of<UsageError>([&] { sync_buffers(*norm, world, BufferSync::Rank0); }),
                ::testing::HasSubstr("the buffer 'running_mean' has no values to send"));
    materialize(*norm);
    sync_buffers(*norm, world, BufferSync::Rank0);
  });
}

}  // namespace
}  // namespace tessera::testing::buffers_test
