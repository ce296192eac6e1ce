// For tests: models, optimizers and dtypes whose training on the device is compared with the CPU's.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/models/bert.h"
#include "tessera/models/gpt.h"
#include "tessera/models/mnist.h"
#include "tessera/models/resnet.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::cases {

inline at::Tensor drawn(int step, at::IntArrayRef sizes) { return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(step)); }
inline at::Tensor words(int step, at::IntArrayRef sizes, int64_t count) {
  return torch::randint(count, sizes, at::make_generator<at::CPUGeneratorImpl>(step), torch::kLong);
}

/// A model, and its batches, which are the same on every device.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int seed)> input;
  std::function<at::Tensor(const at::Tensor& input)> scores;
  std::function<at::Tensor(int seed)> targets;
};

inline Subject mlp(int64_t rows = 8) {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                              torch::nn::Linear(32, 10));
  return {.module = model.ptr(),
          .input = [=](int seed) { return drawn(seed, {rows, 16}); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x); },
          .targets = [=](int seed) { return words(seed, {rows}, 10); }};
}

inline Subject mnist() {
  models::MnistNet model;
  return {.module = model.ptr(),
          .input = [](int seed) { return drawn(seed, {4, 1, 28, 28}); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x); },
          .targets = [](int seed) { return words(seed, {4}, 10); }};
}

inline Subject gpt() {
  models::Gpt model(models::GptOptions{.vocabulary = 50, .width = 16, .layers = 1, .heads = 2, .longest = 8});
  return {.module = model.ptr(),
          .input = [](int seed) { return words(seed, {2, 8}, 50); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x).flatten(0, 1); },
          .targets = [](int seed) { return words(seed, {16}, 50); }};
}

inline Subject bert() {
  models::BertForSequenceClassification model(models::BertConfig{.vocab_size = 50, .hidden_size = 16, .num_hidden_layers = 1, .num_attention_heads = 2,
      .intermediate_size = 32, .max_position_embeddings = 8, .hidden_dropout_prob = 0, .attention_probs_dropout_prob = 0});
  auto mask = torch::ones({2, 8}, torch::kLong);
  mask.index_put_({1, torch::indexing::Slice(5, 8)}, 0);
  return {.module = model.ptr(),
          .input = [](int seed) { return words(seed, {2, 8}, 50); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x, mask.to(x.device())); },
          .targets = [](int seed) { return words(seed, {2}, 2); }};
}

inline Subject block_of_a_resnet() {
  models::Bottleneck model(16, 8, 2);
  return {.module = model.ptr(),
          .input = [](int seed) { return drawn(seed, {4, 16, 12, 12}); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x).mean({2, 3}); },
          .targets = [](int seed) { return words(seed, {4}, 32); }};
}

inline Subject resnet50() {
  models::ResNet model(models::ResNetOptions::resnet50(10));
  return {.module = model.ptr(),
          .input = [](int seed) { return drawn(seed, {8, 3, 64, 64}); },
          .scores = [=](const at::Tensor& x) mutable { return model->forward(x); },
          .targets = [](int seed) { return words(seed, {8}, 10); }};
}

/// Moves a batch to the device of the model: floating-point values also to its dtype, integers as they are.
inline at::Tensor to_model(const at::Tensor& input, at::TensorOptions where) {
  return input.is_floating_point() ? input.to(where) : input.to(where.device());
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;

inline Optimizer sgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
}
inline Optimizer adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
}

using MakeSubject = Subject (*)();
using MakeOptimizer = Optimizer (*)(std::vector<at::Tensor>);

inline void step_once(const Subject& subject, torch::optim::Optimizer& optimizer, int step, at::TensorOptions where, std::vector<at::Tensor>& losses) {
  optimizer.zero_grad();
  auto scores = subject.scores(to_model(subject.input(step), where));
  if (scores.scalar_type() != torch::kDouble) scores = scores.to(torch::kFloat);
  const auto loss = torch::nn::functional::cross_entropy(scores, subject.targets(1).to(where.device()));
  loss.backward();
  for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (1 + step));
  optimizer.step();
  losses.push_back(loss.detach());
  if (where.device().type() != at::kCPU) step_boundary();
}

inline std::vector<float> numbers(const std::vector<at::Tensor>& losses) {
  std::vector<float> all;
  for (const auto& loss : losses) all.push_back(loss.item<float>());
  return all;
}

inline constexpr int kSteps = 50;

inline std::vector<float> losses_of(MakeSubject make, MakeOptimizer make_optimizer, at::TensorOptions where, int steps = kSteps) {
  torch::manual_seed(3);
  const auto subject = make();
  subject.module->to(where.dtype().toScalarType());
  if (where.device().type() != at::kCPU) to_device(*subject.module);
  const auto optimizer = make_optimizer(subject.module->parameters());
  std::vector<at::Tensor> losses;
  for (int step = 0; step < steps; step++) step_once(subject, *optimizer, step, where, losses);
  return numbers(losses);
}

inline double mean_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++) sum += std::abs(a[i] - b[i]);
  return sum / static_cast<double>(a.size());
}

struct Case {
  std::string name;
  MakeSubject make;
  MakeOptimizer optimizer;
  at::ScalarType dtype;
  int steps = kSteps;
};

inline std::vector<Case> all_cases() {
  const std::pair<std::string, MakeSubject> subjects[] = {
      {"Mlp", [] { return mlp(); }}, {"MnistNet", mnist}, {"Gpt", gpt}, {"Bert", bert}, {"BlockOfAResNet", block_of_a_resnet}};
  std::vector<Case> cases;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const std::string end = dtype == at::kFloat ? "" : "InBf16";
    for (const auto& [name, make] : subjects) {
      cases.push_back({name + "Sgd" + end, make, sgd, dtype});
      cases.push_back({name + "AdamW" + end, make, adamw, dtype});
    }
  }
  // With single precision, rounding alone changes the losses of a ResNet by tenths within two steps: batch norms divide by the spread of a
  // few values. With double precision, it does so by 1e-4 within ten.
  cases.push_back({"ResNet50SgdInDouble", resnet50, sgd, at::kDouble, 8});
  cases.push_back({"MlpSgdInFp16", [] { return mlp(); }, sgd, at::kHalf});
  return cases;
}

/// Expects the losses of the CPU, one program for the first step and one for all later steps, and no operator that fell back to the CPU.
inline void expect_losses_of_the_cpu(const Case& which) {
  const auto& [name, make, optimizer, dtype, steps] = which;
  const auto device = device_for_tests();
  const auto expected = losses_of(make, optimizer, at::TensorOptions(at::kCPU).dtype(dtype), steps);
  const auto programs = metrics().programs.size();
  const auto fell_back = metrics().fallbacks.size();
  const auto actual = losses_of(make, optimizer, at::TensorOptions(device).dtype(dtype), steps);
  EXPECT_EQ(metrics().programs.size(), programs + 2);
  EXPECT_EQ(metrics().fallbacks.size(), fell_back) << metrics_report();
  if (dtype == at::kFloat || dtype == at::kDouble) {
    for (size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(actual[i], expected[i], 1e-4) << i;
    return;
  }
  // Losses in half precision soon differ from those in full precision, and compilers round in other places: the device may be twice as far
  // from full precision as the CPU is.
  const auto full = losses_of(make, optimizer, at::TensorOptions(at::kCPU).dtype(at::kFloat), steps);
  EXPECT_LE(mean_distance(actual, full), 2 * mean_distance(expected, full) + 0.002) << mean_distance(expected, full);
}

}  // namespace tessera::xla::cases
