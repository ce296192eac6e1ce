// Unmodified modules train on the device as on the CPU.
#include "tessera/models/bert.h"
#include "tessera/models/gpt.h"
#include "tessera/models/mnist.h"
#include "tessera/models/resnet50.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace tessera::xla {
namespace {

at::Device xla() {
  static const auto device = make_device();
  return device;
}

std::vector<std::string> names_of_fallbacks() {
  std::vector<std::string> names;
  for (const auto& fallback : fallbacks()) names.push_back(fallback.name);
  return names;
}

torch::nn::Sequential mlp() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                               torch::nn::Linear(32, 10));
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(std::vector<at::Tensor>)>;

Optimizer sgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}
Optimizer adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
}

/// One step's loss of a model, on whatever device the model is.
using Loss = std::function<at::Tensor(int step, at::Device device)>;

std::vector<float> train(const torch::nn::Module& model, const Loss& loss_of, int steps, at::Device device, const MakeOptimizer& make_optimizer) {
  const auto optimizer = make_optimizer(model.parameters());
  std::vector<at::Tensor> losses;
  for (int step = 0; step < steps; step++) {
    optimizer->zero_grad();
    const auto loss = loss_of(step, device);
    loss.backward();
    for (auto& group : optimizer->param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer->step();
    losses.push_back(loss.detach());
    if (device.type() != at::kCPU) step_boundary();
  }
  std::vector<float> numbers;
  for (const auto& loss : losses) numbers.push_back(loss.item<float>());
  return numbers;
}

/// As many programs as a first and all later steps have, without an operator on the CPU, and the CPU's losses.
template <class Model, class LossOf>
void expect_same_losses(const std::function<Model()>& make, const LossOf& loss_of, const MakeOptimizer& make_optimizer, int steps = 50) {
  xla();
  const auto model = [&] {
    torch::manual_seed(3);
    return make();
  };
  auto here = model(), there = model();
  to_device(*there);
  const auto losses = [&](Model& of) -> Loss { return [&](int step, at::Device device) { return loss_of(of, step, device); }; };
  const auto expected = train(*here, losses(here), steps, at::kCPU, make_optimizer);
  const auto before = metrics();
  const auto fell_back = fallbacks().size();
  const auto actual = train(*there, losses(there), steps, xla(), make_optimizer);
  for (size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(actual[i], expected[i], 1e-4) << i;
  EXPECT_EQ(metrics().compiles + metrics().loaded_from_disk - before.compiles - before.loaded_from_disk, 2);
  EXPECT_EQ(fallbacks().size(), fell_back) << ::testing::PrintToString(names_of_fallbacks());
}

at::Tensor drawn(int step, at::IntArrayRef sizes) { return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(step)); }
at::Tensor words(int step, at::IntArrayRef sizes, int64_t count) {
  return torch::randint(count, sizes, at::make_generator<at::CPUGeneratorImpl>(step), torch::kLong);
}

at::Tensor loss_of_mlp(torch::nn::Sequential& model, int step, at::Device device) {
  return torch::nn::functional::cross_entropy(model->forward(drawn(step, {8, 16}).to(device)), words(step, {8}, 10).to(device));
}

TEST(Training, WithSgd) { expect_same_losses<torch::nn::Sequential>(mlp, loss_of_mlp, sgd); }

TEST(Training, WithAdam) { expect_same_losses<torch::nn::Sequential>(mlp, loss_of_mlp, adamw); }

TEST(Training, OfTheMnistNet) {
  expect_same_losses<models::MnistNet>([] { return models::MnistNet(); }, [](models::MnistNet& model, int step, at::Device device) {
    return torch::nn::functional::nll_loss(model->forward(drawn(step, {4, 1, 28, 28}).to(device)), words(step, {4}, 10).to(device));
  }, sgd, 10);
}

TEST(Training, OfAGpt) {
  const auto make = [] { return models::Gpt(models::GptOptions{.vocabulary = 50, .width = 16, .layers = 2, .heads = 2, .longest = 8}); };
  expect_same_losses<models::Gpt>(make, [](models::Gpt& model, int step, at::Device device) {
    const auto tokens = words(step, {2, 8}, 50).to(device);
    return torch::nn::functional::cross_entropy(model->forward(tokens).flatten(0, 1), tokens.flatten());
  }, adamw, 20);
}

TEST(Training, OfABert) {
  const auto make = [] {
    return models::BertForSequenceClassification(models::BertConfig{.vocab_size = 50, .hidden_size = 16, .num_hidden_layers = 2, .num_attention_heads = 2,
        .intermediate_size = 32, .max_position_embeddings = 8, .hidden_dropout_prob = 0, .attention_probs_dropout_prob = 0});
  };
  expect_same_losses<models::BertForSequenceClassification>(make, [](models::BertForSequenceClassification& model, int step, at::Device device) {
    auto mask = torch::ones({2, 8}, torch::kLong);
    mask.index_put_({1, torch::indexing::Slice(5, 8)}, 0);
    return torch::nn::functional::cross_entropy(model->forward(words(step, {2, 8}, 50).to(device), mask.to(device)), words(step, {2}, 2).to(device));
  }, adamw, 20);
}

TEST(Training, OfABlockOfAResNet) {
  const auto make = [] {
    models::Bottleneck block(16, 8, 2);
    block->to(torch::kDouble);  // batch norms over few values magnify what rounding leaves
    return block;
  };
  expect_same_losses<models::Bottleneck>(make, [](models::Bottleneck& block, int step, at::Device device) {
    return block->forward(drawn(step, {2, 16, 12, 12}).to(torch::kDouble).to(device)).pow(2).mean();
  }, sgd, 10);
}

TEST(Views, AreReadAndWrittenAsOnTheCpu) {
  std::mt19937 random(5);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint64_t>(below)); };
  for (int trial = 0; trial < 60; trial++) {
    const auto base = torch::arange(2 * 3 * 4 * 5, torch::kFloat).view({2, 3, 4, 5}) + 1;
    auto here = base.clone(), there = base.to(xla());
    auto view_here = here, view_there = there;
    for (int i = 0; i < 4 && view_here.dim() > 0; i++) {
      const auto d = draw(view_here.dim()), size = view_here.size(d);
      const auto apply = [&](const auto& change) { view_here = change(view_here), view_there = change(view_there); };
      switch (draw(6)) {
        case 0: apply([&, other = draw(view_here.dim())](const at::Tensor& t) { return t.transpose(d, other); }); break;
        case 1: apply([&, at = draw(size)](const at::Tensor& t) { return t.select(d, at); }); break;
        case 2: apply([&, from = draw(size)](const at::Tensor& t) { return t.narrow(d, from, size - from); }); break;
        case 3: apply([&](const at::Tensor& t) { return t.slice(d, 0, size, 2); }); break;
        case 4: apply([&](const at::Tensor& t) { return t.unsqueeze(d); }); break;
        case 5: apply([&](const at::Tensor& t) { return t.dim() > 1 ? t.diagonal(0, 0, 1) : t; }); break;
      }
    }
    ASSERT_TRUE(at::equal(view_there.cpu(), view_here)) << trial << " " << view_here.sizes() << view_here.strides();
    view_here.mul_(-2), view_there.mul_(-2);
    ASSERT_TRUE(at::equal(there.cpu(), here)) << trial << " " << view_here.sizes() << view_here.strides();
  }
}

}  // namespace
}  // namespace tessera::xla
