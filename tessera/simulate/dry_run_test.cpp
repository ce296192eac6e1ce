// Programs under TESSERA_DRY_RUN. Each runs in a process of its own, because a dry run changes what all tensors of a process are.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "tessera/base/input_file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/init.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/folder.h"

namespace tessera::dry_run_test {
namespace {

using nlohmann::json;
using testing::Folder;

constexpr int64_t kWidth = 256, kBlocks = 4, kRows = 128;
constexpr int64_t kBlock = kWidth * kWidth + kWidth;  // parameters

torch::nn::Sequential net(int64_t width = kWidth) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < kBlocks; i++) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

void shard(torch::nn::Sequential& model, const ShardOptions& options) {
  for (size_t i = 0; i < model->size(); i += 2) fully_shard(*model->ptr(i), options);
  fully_shard(model, options);
}

void train(torch::nn::Sequential& model, int64_t width = kWidth, int64_t rows = kRows) {
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  for (int step = 0; step < 10; step++) {
    model->forward(at::randn({rows, width})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Runs a program, and returns the outcome of the dry run that it has become.
json outcome_of(const char* ranks, const std::function<void()>& program) {
  const Folder folder;
  const auto file = folder / "outcome.json";
  const auto child = ::fork();
  if (child == 0) {
    ::setenv("TESSERA_DRY_RUN", ranks, 1);
    ::setenv("TESSERA_DRY_RUN_OUT", file.c_str(), 1);
    try {
      program();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
    std::exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return json::parse(InputFile(file).read_all());
}

TEST(DryRun, MemoryAndTrafficFollowTheFormulas) {
  const auto outcome = outcome_of("8/4", [] {
    const auto world = init();
    auto model = net();
    shard(model, {.mesh = world, .residence = Residence::Gathered});
    train(model);
  });
  EXPECT_EQ(outcome["world"], 8);
  EXPECT_EQ(outcome["steps"], 3);
  EXPECT_EQ(outcome["units"].size(), kBlocks);
  EXPECT_EQ(outcome["parameters"], kBlocks * kBlock);
  const auto& kinds = outcome["memory"]["kinds"];
  const auto shard_bytes = outcome["units"][0]["shard"].get<int64_t>();
  EXPECT_GE(shard_bytes, 4 * kBlock / 8);
  EXPECT_LE(shard_bytes, 4 * kBlock / 8 + 1024);  // padding
  const auto share = kBlocks * shard_bytes, block = 8 * shard_bytes;
  EXPECT_EQ(kinds["parameters"], share);
  EXPECT_EQ(kinds["optimizer"], 2 * share);
  EXPECT_LE(kinds["gradients"], share);
  EXPECT_EQ(kinds["unsharded"], 2 * block);
  // Each gather and each reduction sends a rank's part to 7 others. Forward gathers all units, and backward finds the last two of them.
  EXPECT_EQ(outcome["traffic"]["gathered"], (2 * kBlocks - 2) * 7 * shard_bytes);
  EXPECT_EQ(outcome["traffic"]["reduced"], kBlocks * 7 * shard_bytes);
  EXPECT_EQ(outcome["flops"], 2.0 * kRows * kWidth * kWidth * (3 * kBlocks - 1));
  EXPECT_GT(outcome["time"]["communication"], 0);
  EXPECT_TRUE(outcome["ran"].empty()) << outcome["ran"];
}

TEST(DryRun, RanksOfAHostShareParameters) {
  const auto outcome = outcome_of("4/4", [] {
    const auto world = init();
    auto model = net();
    shard(model, {.mesh = world, .residence = Residence::NodeShared});
    train(model);
  });
  EXPECT_EQ(outcome["memory"]["kinds"]["unsharded"], 0);
  EXPECT_NEAR(outcome["memory"]["kinds"]["parameters"].get<double>(), 4.0 * kBlocks * kBlock / 4, 10'000);
  EXPECT_EQ(outcome["traffic"]["gathered"], 0);
}

TEST(DryRun, NeedsNoMemoryForLargeModels) {
  constexpr int64_t kLarge = 50'000;
  const auto outcome = outcome_of("64/8", [] {
    const auto world = init();
    auto model = deferred_init([] { return net(kLarge); });
    shard(model, {.mesh = world, .residence = Residence::Gathered});
    train(model, kLarge, 16);
  });
  EXPECT_EQ(outcome["parameters"], kBlocks * (kLarge * kLarge + kLarge));
  rusage use{};
  ::getrusage(RUSAGE_CHILDREN, &use);
  EXPECT_LT(use.ru_maxrss, 2 << 20) << "KiB";
}

TEST(DryRun, StepsOfOtherOptimizersEndWithBackward) {
  const auto outcome = outcome_of("2", [] {
    const auto world = init();
    auto model = net();
    shard(model, {.mesh = world});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 10; step++) {
      model->forward(at::randn({kRows, kWidth})).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  EXPECT_EQ(outcome["steps"], 3);
  EXPECT_EQ(outcome["flops"], 2.0 * kRows * kWidth * kWidth * (3 * kBlocks - 1));
}

TEST(DryRun, AStepHasAllOptimizers) {
  const auto outcome = outcome_of("2", [] {
    const auto world = init();
    auto one = net(), other = net();
    shard(one, {.mesh = world});
    shard(other, {.mesh = world});
    optim::AdamW of_one(one->parameters(), {.lr = 1e-3}), of_other(other->parameters(), {.lr = 1e-3});
    for (int step = 0; step < 10; step++) {
      for (auto& [model, optimizer] : {std::pair(&one, &of_one), std::pair(&other, &of_other)}) {
        (*model)->forward(at::randn({kRows, kWidth})).square().mean().backward();
        optimizer->step();
        optimizer->zero_grad();
      }
    }
  });
  EXPECT_EQ(outcome["flops"], 2 * 2.0 * kRows * kWidth * kWidth * (3 * kBlocks - 1));
}

TEST(DryRun, LeavesNoFiles) {
  const Folder folder;
  outcome_of("2", [&] {
    const auto world = init();
    auto model = net();
    shard(model, {.mesh = world});
    checkpoint::save(folder / "saved", {.model = model.ptr().get()}, world);
    train(model);
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DryRun, SaysHowFarAProgramCame) {
  const auto outcome = outcome_of("2", [] {
    const auto world = init();
    auto model = net();
    shard(model, {.mesh = world});
    at::gelu(at::ones({8}));  // computed by oneDNN, which frees memory by its address
    model->forward(at::randn({kRows, kWidth})).sum().backward();
  });
  EXPECT_EQ(outcome["steps"], 1);
  EXPECT_EQ(outcome["units"].size(), kBlocks);
}

TEST(DryRun, AResultThatCantBeWrittenIsAnError) {
  const auto child = ::fork();
  if (child == 0) {
    ::setenv("TESSERA_DRY_RUN", "2", 1);
    ::setenv("TESSERA_DRY_RUN_OUT", "/nowhere/outcome.json", 1);
    init();
    std::exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

TEST(DryRun, WrongNumbersAreErrors) {
  for (const auto* const wrong : {"", "0", "-1", "x", "4/", "4/0", "4/2/1", "1e3", "12/8"}) {
    const auto child = ::fork();
    if (child == 0) {
      ::setenv("TESSERA_DRY_RUN", wrong, 1);
      try {
        init();
      } catch (const ConfigError& error) {
        ::_exit(std::string(error.what()).find("TESSERA_DRY_RUN") != std::string::npos ? 0 : 2);
      }
      ::_exit(*wrong == '\0' ? 0 : 3);  // an empty variable counts as unset
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << wrong;
  }
}

}  // namespace
}  // namespace tessera::dry_run_test
