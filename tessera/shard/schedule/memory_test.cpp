// Memory use, measured by the operating system and by the counters: a model that is built and sharded block by block never takes more
// memory than one unsharded block and its shards.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>

#include "tessera/comm/fake/fake.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"

namespace tessera::testing::memory_test {
namespace {

constexpr int kRanks = 8, kBlocks = 10;
constexpr int64_t kWidth = 4096;
constexpr double kBlock = 4.0 * kWidth * kWidth / 1e6;  // MB; so large that the allocator returns it to the kernel at once
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

namespace nn = torch::nn;

TEST(WholeUnits, AreBoundedAlsoWithoutGradients) {
  with_ranks(2, [](const Communicator& world) {
    nn::Sequential layers;
    for (int i = 0; i < 8; i++) {
      nn::Linear layer(16, 16);
      for (auto& parameter : layer->parameters()) parameter.set_requires_grad(i % 2 == 0);  // every second one is frozen
      fully_shard(layer, {.mesh = world, .start = Start::FromRank0});
      layers->push_back(layer);
    }
    fully_shard(layers, {.mesh = world});
    const auto first = units(*layers).front();
    const auto one = first->memory().unsharded_bytes(first->buffers());
    const auto run = [&](bool training) {
      reset_counters(*layers);
      const auto y = layers->forward(at::ones({2, 16})).sum();
      if (training) y.backward();
      EXPECT_LE(counters(*layers).peak_unsharded_bytes, 3 * one);
    };
    for (int step = 0; step < 4; step++) {
      run(true);
      if (step == 0) continue;  // the order of use is not known yet
      // Once in each direction; but the first weight is not needed in backward, and the last unit is still whole when that begins.
      for (const auto& unit : units(*layers)) {
        EXPECT_EQ(unit->counters().gathers, unit->name() == "0" || unit->name() == "7" ? 1 : 2) << unit->name() << " step " << step;
      }
    }
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 4; pass++) {
      run(false);
      if (pass == 0) continue;
      for (const auto& unit : units(*layers)) EXPECT_EQ(unit->counters().gathers, 1) << unit->name() << " pass " << pass;
    }
  });
}

TEST(WholeUnits, AreFreedBeforeFullyShardReturns) {
  with_ranks(2, [](const Communicator& world) {
    nn::Linear layer(64, 64);
    const c10::weak_intrusive_ptr<c10::StorageImpl> before(layer->weight.storage().getWeakStorageImpl());
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0});
    EXPECT_TRUE(before.expired());
    // The unit does not outlive the module either.
    const std::weak_ptr<Unit> unit = units(*layer).front();
    layer(at::ones({1, 64})).sum().backward();
    layer = nullptr;
    EXPECT_TRUE(unit.expired());
  });
}

TEST(WholeUnits, MayLieWhereADeadModuleDid) {
  with_ranks(1, [](const Communicator& world) {
    std::vector<at::Tensor> graphs;  // keep the units
    for (int i = 0; i < 20; i++) {
      nn::Linear layer(4, 4);
      fully_shard(layer, {.mesh = world});
      graphs.push_back(layer(at::ones({2, 4})).sum());
    }
    for (auto& graph : graphs) graph.backward();
  });
}

}  // namespace
}  // namespace tessera::testing::memory_test
