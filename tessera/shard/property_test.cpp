// Random models, units, worlds and scripts of steps, compared with the replicated training of the same.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "tessera/base/env.h"
#include "tessera/testing/parity.h"

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using Random = std::mt19937;

/// Layers drawn by lot: some used twice, some frozen, some skipped now and then by all ranks alike.
struct Drawn : TrainedModel {
  std::vector<nn::Linear> layers;
  std::vector<int> order;  // of use
  int width;
  int step = 0;

  explicit Drawn(unsigned seed) {
    Random lot(seed);
    width = 1 + static_cast<int>(lot() % 9);
    const int count = 1 + static_cast<int>(lot() % 5);
    for (int i = 0; i < count; i++) {
      nn::Linear layer(nn::LinearOptions(width, width).bias(lot() % 3 != 0));
      if (i > 0 && lot() % 4 == 0) layer->weight.set_requires_grad(false);
      layers.push_back(register_module("layer" + std::to_string(i), layer));
    }
    const int uses = count + static_cast<int>(lot() % 4);
    for (int i = 0; i < uses; i++) order.push_back(i < count ? i : static_cast<int>(lot() % static_cast<unsigned>(count)));
  }

  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < order.size(); i++) {
      if (i > 0 && (static_cast<size_t>(step) + i) % 7 == 6) continue;  // a step unlike the recorded one
      x = torch::tanh(layers[static_cast<size_t>(order[i])](x)) + x;
    }
    return x;
  }

  at::Tensor loss(at::Generator& batches) override {
    step++;
    auto total = forward(at::randn({3, width}, batches)).pow(2).mean();
    if (step % 3 == 0) total = total + forward(at::randn({2, width}, batches)).sum() * 0.1;  // two forwards, one backward
    if (step % 4 == 0) {
      const torch::NoGradGuard no_grad;
      forward(at::randn({1, width}, batches));  // an evaluation between
    }
    return total;
  }
};

void compare(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random lot(seed * 7919 + 1);
  const int ranks = 1 + static_cast<int>(lot() % 5);
  const bool adam = lot() % 2 == 0;
  const auto units = lot();
  const auto optimizer = [adam](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    if (adam) return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.5));
  };
  const auto shard = [units](const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
    const int live = 1 + static_cast<int>(units % 3);
    size_t i = 0;
    for (const auto& child : model->children()) {
      if ((units >> (4 + i++)) % 2 == 0) fully_shard(child, {.mesh = world, .max_live_units = live});
    }
    fully_shard(model, {.mesh = world, .max_live_units = live});
  };
  expect_parity(
      ranks, [seed] { return std::make_shared<Drawn>(seed); }, optimizer, 9, shard);
}

TEST(Property, DrawnModelsTrainLikeReplicatedOnes) {
  // A few seconds of the first models, or what TESSERA_PROPERTY_SECONDS and TESSERA_PROPERTY_FIRST say.
  const auto seconds = env_int("TESSERA_PROPERTY_SECONDS", 1, 100'000).value_or(8);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const auto first = static_cast<unsigned>(env_int("TESSERA_PROPERTY_FIRST", 0, 1'000'000'000).value_or(0));
  unsigned seed = first;
  while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure()) compare(seed++);
  RecordProperty("models", static_cast<int>(seed - first));
  std::printf("%u models\n", seed - first);
}

}  // namespace
}  // namespace tessera::testing
