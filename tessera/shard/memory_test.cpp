// What the kernel says about memory: a model that is built and sharded block by block never takes more than one block and its shards.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>

#include "tessera/comm/fake/fake.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/model.h"

namespace tessera::testing {
namespace {

constexpr int kRanks = 8, kBlocks = 10;
constexpr int64_t kWidth = 4096;
constexpr double kBlock = 4.0 * kWidth * kWidth / 1e6;  // MB; so large that it goes back to the kernel at once
constexpr double kMargin = 30;                          // for the allocator

/// MB, from /proc/self/status: "VmRSS" now, "VmHWM" the peak.
double resident(const std::string& which) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kilobytes = 0;
    if (word == which + ":" && status >> kilobytes) return kilobytes * 1024 / 1e6;
  }
  ADD_FAILURE() << "no " << which << " in /proc/self/status";
  return 0;
}

void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

TEST(ResidentMemory, IsOneBlockAndTheShards) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep what is freed";
#endif
  const auto world = fake_world(3, kRanks);
  torch::nn::Sequential model;
  torch::nn::Linear(kWidth, 8)->forward(at::ones({1, kWidth}));  // libraries that load on first use
  const auto before = resident("VmRSS");
  forget_peak();
  for (int i = 1; i <= kBlocks; i++) {
    torch::nn::Linear block(kWidth, kWidth);
    const auto whole = resident("VmRSS");
    fully_shard(block, {.mesh = world});
    EXPECT_LT(resident("VmRSS"), whole - kBlock + kBlock / kRanks + kMargin) << "block " << i << " is still in memory";
    model->push_back(block);
  }
  fully_shard(model, {.mesh = world});
  const double shards = kBlocks * kBlock / kRanks;
  EXPECT_LT(resident("VmHWM") - before, kBlock + shards + kMargin);
  EXPECT_LT(resident("VmRSS") - before, shards + kMargin);

  const torch::NoGradGuard no_grad;
  for (int pass = 0; pass < 2; pass++) model->forward(at::ones({1, kWidth}));
  EXPECT_LT(resident("VmHWM") - before, 2 * kBlock + shards + kMargin) << "more than max_live_units were whole in an evaluation";
  EXPECT_GT(resident("VmHWM") - before, kBlock + shards) << "a block of this test is smaller than it says";
}

}  // namespace
}  // namespace tessera::testing
