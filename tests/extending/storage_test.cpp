// A run saves into a store of one's own, and goes on from it, on another number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory_storage.h"
#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::extending_storage_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OwnStorage : public ::testing::Test {
 protected:
  void SetUp() override { use_storage("memory", store_); }
  void TearDown() override { use_storage("memory", nullptr); }

  const std::shared_ptr<own::MemoryStorage> store_ = std::make_shared<own::MemoryStorage>();
};

/// Steps of a net with what a checkpoint has, and its weights at the end.
std::map<std::string, at::Tensor> trained(const Communicator& world, int steps, const std::filesystem::path& save_as,
                                          const checkpoint::SaveOptions& options = {}, int64_t values = 0) {
  auto net = seeded_net();
  if (values > 0) net->register_buffer("much", at::arange(values).to(at::kFloat));
  fully_shard(net, {.mesh = world});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
  checkpoint::Contents contents{.model = net.get(), .optimizer = &optimizer};
  if (const auto last = checkpoint::latest("memory://runs/net", world)) checkpoint::load(*last, contents, world);
  for (int i = 0; i < steps; i++) {
    net(input(i)).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (!save_as.empty()) checkpoint::save(save_as, contents, world, options);
  return checkpoint::full_state_dict(*net);
}

TEST_F(OwnStorage, KeepsARun) {
  std::map<std::string, at::Tensor> saved;
  with_ranks(2, [&](const Communicator& world) {
    const checkpoint::PrefixLock lock("memory://runs/net", world);
    for (const int step : {1, 2, 3}) {
      const auto now = trained(world, 1, checkpoint::step_folder("memory://runs/net", step), {.keep = checkpoint::Keep{.last = 2}});
      if (world.rank() == 0) saved = now;
    }
    checkpoint::AsyncSaver saver(world);
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    saver.save("memory://runs/beside", {.model = net.get()});
    saver.wait();
  });
  EXPECT_THAT(store_->list("runs/net"),
              ElementsAre("runs/net-latest", "runs/net-step-000002/manifest.json", "runs/net-step-000002/rank-0-of-2.safetensors",
                          "runs/net-step-000002/rank-1-of-2.safetensors", "runs/net-step-000003/manifest.json",
                          "runs/net-step-000003/rank-0-of-2.safetensors", "runs/net-step-000003/rank-1-of-2.safetensors"));
  EXPECT_TRUE(store_->size("runs/beside/manifest.json"));
  with_ranks(3, [&](const Communicator& world) { expect_same(trained(world, 0, {}), saved); });
  EXPECT_THAT(checkpoint::inspect("memory://runs/net-step-000003"), HasSubstr("AdamW"));
  EXPECT_THAT(checkpoint::verify("memory://runs/net-step-000003").faults, IsEmpty());
}

TEST_F(OwnStorage, IsReadAndWrittenByConversions) {
  const Folder folder;
  std::map<std::string, at::Tensor> saved;
  with_ranks(1, [&](const Communicator& world) { saved = trained(world, 2, "memory://runs/net-step-000002"); });
  checkpoint::consolidate("memory://runs/net-step-000002", folder / "net.safetensors");
  checkpoint::convert("memory://runs/net-step-000002", folder / "dcp", {.to = checkpoint::Format::Dcp, .settings = {{"lr", 0.1}}});
  checkpoint::convert(folder / "dcp", "memory://runs/net-step-000003", {.world = 2});
  with_ranks(2, [&](const Communicator& world) { expect_same(trained(world, 0, {}), saved); });
  EXPECT_EQ(checkpoint::latest("memory://runs/net"), "memory://runs/net-step-000003");
}

TEST_F(OwnStorage, TakesObjectsOfManyParts) {
  constexpr int64_t kValues = 11 << 20;  // 44 MB: three parts
  with_ranks(1, [&](const Communicator& world) {
    const auto saved = trained(world, 0, "memory://runs/large", {}, kValues);
    EXPECT_GT(*store_->size("runs/large/rank-0-of-1.safetensors"), 2 * upload_part(0));
    auto net = seeded_net();
    net->register_buffer("much", at::zeros({kValues}));
    fully_shard(net, {.mesh = world});
    checkpoint::Contents contents{.model = net.get()};
    checkpoint::load("memory://runs/large", contents, world);
    expect_same(checkpoint::full_state_dict(*net), saved);
  });
}

TEST_F(OwnStorage, HasNoCheckpointUntilAllOfItIsThere) {
  with_ranks(2, [&](const Communicator& world) { trained(world, 1, "memory://runs/net-step-000001"); });
  store_->remove("runs/net-step-000001/manifest.json");
  store_->remove("runs/net-step-000001/rank-1-of-2.safetensors");
  EXPECT_FALSE(checkpoint::latest("memory://runs/net"));
  with_ranks(1, [&](const Communicator& world) { trained(world, 1, "memory://runs/net-step-000001"); });  // what was left is removed
  EXPECT_THAT(store_->list("runs/"),
              ElementsAre("runs/net-latest", "runs/net-step-000001/manifest.json", "runs/net-step-000001/rank-0-of-1.safetensors"));
  store_->remove("runs/net-step-000001/rank-0-of-1.safetensors");
  EXPECT_FALSE(checkpoint::latest("memory://runs/net"));
}

TEST_F(OwnStorage, RefusesWhatNeedsAFileSystem) {
  with_ranks(2, [&](const Communicator& world) {
    EXPECT_THAT(message_of<UsageError>([&] { trained(world, 0, "memory://runs/a", {.format = checkpoint::Format::Dcp}); }),
                HasSubstr("memory://runs/a is in an object store, where Tessera's format can be written, but not a folder of "
                          "torch.distributed.checkpoint"));
    trained(world, 0, "memory://runs/a");
    EXPECT_THAT(message_of<IoError>([&] { trained(world, 0, "memory://runs/a"); }), HasSubstr("there is a memory://runs/a already"));
    EXPECT_THAT(message_of<IoError>([&] { trained(world, 0, "memory://runs/a/rank-0-of-2.safetensors"); }), HasSubstr("already"));
  });
}

}  // namespace
}  // namespace tessera::testing::extending_storage_test
