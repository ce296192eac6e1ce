// Random models with random units, worlds and sequences of steps, compared with replicated training.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "tessera/base/env.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tessera/testing/parity.h"

namespace tessera::testing::property_test {
namespace {

namespace nn = torch::nn;
using Random = std::mt19937;

/// What a program does to its parameters besides training them, alike on all ranks and on every value by itself.
enum class Move { None, ByOperator, ByPointer, FreezeMember, FreezeParameter, SecondOptimizer, Count };

/// Layers drawn by lot: some used twice, some frozen, some skipped now and then by all ranks alike, one whose weight was a view.
struct Drawn : TrainedModel {
  std::vector<nn::Linear> layers;
  at::Tensor scale;        // a row of a matrix, when it was registered
  std::vector<int> order;  // of use
  int width;
  int step = 0;
  std::vector<Move> moves;  // one for each step
  int target = 0;           // the layer that is frozen and thawed
  bool throws = false;      // now and then, in the middle of a forward pass
  std::unique_ptr<torch::optim::Optimizer> second;
  bool keeps_gradients;  // until the end of the step

  explicit Drawn(unsigned seed, bool keeps_gradients) : keeps_gradients(keeps_gradients) {
    Random lot(seed);
    width = 1 + static_cast<int>(lot() % 9);
    const int count = 1 + static_cast<int>(lot() % 5);
    for (int i = 0; i < count; i++) {
      nn::Linear layer(nn::LinearOptions(width, width).bias(lot() % 3 != 0));
      if (lot() % 4 == 0) layer->weight.set_data(layer->weight.detach().t().contiguous().t());
      if (i > 0 && lot() % 4 == 0) layer->weight.set_requires_grad(false);
      if (layer->weight.requires_grad() && lot() % 3 == 0) {
        layer->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
      }
      layers.push_back(register_module("layer" + std::to_string(i), layer));
    }
    scale = register_parameter("scale", at::linspace(0.5, 1.5, 2 * width).view({width, 2}).t()[lot() % 2]);
    const int uses = count + static_cast<int>(lot() % 4);
    for (int i = 0; i < uses; i++) order.push_back(i < count ? i : static_cast<int>(lot() % static_cast<unsigned>(count)));
    for (int i = 0; i < 9; i++) moves.push_back(static_cast<Move>(lot() % static_cast<unsigned>(Move::Count)));
    target = static_cast<int>(lot() % static_cast<unsigned>(count));
    throws = lot() % 3 == 0;
  }

  at::Tensor forward(at::Tensor x, size_t most = 100) {
    for (size_t i = 0; i < order.size(); i++) {
      if (i == most) throw std::runtime_error("enough");
      if (i > 0 && (static_cast<size_t>(step) + i) % 7 == 6) continue;  // a step unlike the recorded one
      x = torch::tanh(layers[static_cast<size_t>(order[i])](x)) + x;
    }
    return x * scale;
  }

  at::Tensor loss(at::Generator& batches) override {
    step++;
    if (throws && step % 3 == 2) {
      try {
        forward(at::ones({2, width}), 1);
      } catch (const std::runtime_error&) {
      }
    }
    auto total = forward(at::randn({3, width}, batches)).pow(2).mean();
    if (step % 3 == 0) total = total + forward(at::randn({2, width}, batches)).sum() * 0.1;  // two forwards, one backward
    if (step % 4 == 0) {
      const torch::NoGradGuard no_grad;
      forward(at::randn({1, width}, batches));  // an evaluation between
    }
    return total;
  }

  void after_step(const std::vector<at::Tensor>& parameters) override {
    const torch::NoGradGuard no_grad;
    const auto chosen = parameters[static_cast<size_t>(step) % parameters.size()];
    const auto frozen = parameters[1 + static_cast<size_t>(step) % (parameters.size() - 1)];  // never the scale: something has to train
    auto& weight = layers[static_cast<size_t>(target)]->weight;
    switch (moves[static_cast<size_t>(step - 1) % moves.size()]) {
      case Move::ByOperator:
        chosen.clamp_(-0.5, 0.5).mul_(0.75);
        break;
      case Move::ByPointer: {
        if (chosen.is_same(parameters[0])) break;  // the plain scale has gaps
        auto* const values = chosen.data_ptr<float>();
        for (int64_t i = 0; i < chosen.numel(); i++) values[i] *= 0.5F;
        break;
      }
      case Move::FreezeMember:
        weight.set_requires_grad(!weight.requires_grad());
        break;
      case Move::FreezeParameter:
        frozen.set_requires_grad(!frozen.requires_grad());
        break;
      case Move::SecondOptimizer: {
        std::vector<at::Tensor> some(parameters.begin(), parameters.begin() + static_cast<int64_t>(parameters.size() + 1) / 2);
        if (!keeps_gradients) break;
        if (!second) second = std::make_unique<torch::optim::SGD>(some, torch::optim::SGDOptions(0.05));
        second->step();
        break;
      }
      case Move::None:
      case Move::Count:
        break;
    }
  }
};

/// Our AdamW, which steps in backward where the parameters are sharded.
struct InBackward final : torch::optim::Optimizer {
  optim::AdamW own;
  explicit InBackward(const std::vector<at::Tensor>& parameters)
      : Optimizer(parameters, std::make_unique<torch::optim::AdamWOptions>()), own(parameters, {.lr = 1e-2}) {
    if (shard_info(parameters.front())) own.step_in_backward();
  }
  at::Tensor step(LossClosure /*closure*/) override {
    own.step();
    return {};
  }
};

void compare(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random lot(seed * 7919 + 1);
  const int ranks = 1 + static_cast<int>(lot() % 5);
  const bool adam = lot() % 2 == 0, in_backward = adam && seed % 2 == 0;
  const auto units = lot();
  const auto optimizer = [=](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    if (in_backward) return std::make_unique<InBackward>(parameters);
    if (adam) return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.5));
  };
  const auto shard = [units](const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
    const int live = 1 + static_cast<int>(units % 3);
    constexpr Layout kLayouts[] = {Layout::Auto, Layout::Flat, Layout::Rows, Layout::WholeParameters};
    const ShardOptions options{.mesh = world, .layout = kLayouts[units / 3 % 4], .max_live_units = live};
    size_t i = 0;
    for (const auto& child : model->children()) {
      if ((units >> (4 + i++)) % 2 == 0) fully_shard(child, options);
    }
    fully_shard(model, options);
  };
  expect_parity(ranks, [=] { return std::make_shared<Drawn>(seed, !in_backward); }, optimizer, 9, shard);
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
}  // namespace tessera::testing::property_test
