// The codec of one's own sends a quarter of the bytes, and the model computes with what that form can say.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "float8.h"
#include "tessera/shard/report.h"
#include "tests/testing/net.h"

namespace tessera::testing::extending_codec_test {
namespace {

/// What a net gathers in one pass.
uint64_t gathered_bytes(const Communicator& world, const CodecPtr& codec) {
  auto net = seeded_net(), plain = seeded_net();
  fully_shard(net, {.mesh = world, .residence = Residence::Gathered, .codec = codec});
  const auto output = net(input());
  EXPECT_TRUE(at::allclose(output, plain(input()), 0.1, 0.1));
  EXPECT_EQ(at::equal(output, plain(input())), codec == nullptr);
  output.sum().backward();
  return counters(*net).gathered_bytes;
}

TEST(OwnCodec, SendsAQuarterOfTheBytes) {
  with_ranks(2, [](const Communicator& world) {
    const auto plain = gathered_bytes(world, nullptr), own = gathered_bytes(world, std::make_shared<own::Float8>());
    EXPECT_LT(own, plain / 3);
    EXPECT_GE(own, plain / 4);
  });
}

}  // namespace
}  // namespace tessera::testing::extending_codec_test
