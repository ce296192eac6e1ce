// deferred_init: modules without memory, whose values are computed parameter by parameter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tessera/models/mlp.h"
#include "tessera/models/resnet50.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/testing/allocations.h"
#include "tessera/testing/net.h"

namespace tessera::testing::deferred_init_test {
namespace {

using ::testing::HasSubstr;
using torch::nn::Module;

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

/// Ranks are threads of one process and share its generator.
template <class Make>
auto seeded(const Make& make) {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(3);
  return make();
}

std::map<std::string, at::Tensor> state_of(const Module& module) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}

void expect_equal(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(found.at(name).strides(), tensor.strides()) << name;
    EXPECT_TRUE(at::equal(found.at(name).detach().cpu(), tensor.detach())) << name;
  }
}

/// Weight normalization, orthogonal and sparse weights, tied weights, views, a buffer that is computed, and a tensor that is neither.
struct Corners : Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Embedding words{nullptr};
  at::Tensor gain, direction, low, table, mask, frequencies, chosen, written;
  Corners() {
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    register_parameter("tied", first->weight);
    lstm = register_module("lstm", torch::nn::LSTM(8, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 8).padding_idx(2)));
    torch::nn::init::orthogonal_(second->weight, 1.5);
    torch::nn::init::sparse_(lstm->all_weights()[0], 0.5);
    const auto v = torch::randn({8, 8});
    direction = register_parameter("direction", v);
    gain = register_parameter("gain", v.norm(2, 1, true));
    low = register_parameter("low", torch::randn({16, 8}).slice(0, 4, 12).to(torch::kBFloat16));
    table = register_buffer("table", torch::outer(torch::arange(5, torch::kFloat), torch::arange(3).to(torch::kFloat).mul(-0.3).exp()).sin());
    mask = register_buffer("mask", torch::ones({4, 4}).triu(1).to(torch::kBool));
    frequencies = torch::pow(10000, -torch::arange(0, 8, 2).div(8.0));
    chosen = register_parameter("chosen", torch::full({3}, torch::randn({2}).sum().item<double>() > 0 ? 1.5 : 0.5));
    written = register_parameter("written", torch::zeros({2, 3}));
    torch::NoGradGuard no_grad;
    written[1].copy_(torch::tensor({1.5F, 2.5F, 3.5F}));
    written.add_(torch::tensor(std::vector<float>{1, 2, 3}));
    written[0][2] = 7;
    gain.masked_fill_(gain.gt(3), 3);
  }
};

struct Case {
  std::string name;
  std::function<std::shared_ptr<Module>()> make;
};

std::vector<Case> cases() {
  return {{"mlp", []() -> std::shared_ptr<Module> { return models::Mlp(models::MlpOptions{.width = 8, .layers = 3, .classes = 4}).ptr(); }},
          {"gpt", []() -> std::shared_ptr<Module> { return models::Gpt(models::GptOptions{.vocabulary = 40, .width = 16, .layers = 2, .heads = 2, .longest = 8}).ptr(); }},
          {"resnet", []() -> std::shared_ptr<Module> { return models::ResNet50().ptr(); }},
          {"transformer",
           [] {
             const auto layer = torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32);
             return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 3)).ptr();
           }},
          {"corners", [] { return std::make_shared<Corners>(); }}};
}

TEST(DeferredInit, IsBitEqualToEagerConstruction) {
  for (const auto& [name, make] : cases()) {
    SCOPED_TRACE(name);
    torch::manual_seed(3);
    const auto eager = make();
    const auto next = torch::rand({3});
    torch::manual_seed(3);
    const auto deferred = deferred_init(make);
    EXPECT_TRUE(at::equal(torch::rand({3}), next));  // the generator is where it would be
    for (const auto& parameter : deferred->parameters()) EXPECT_TRUE(parameter.is_meta());
    materialize(*deferred);
    expect_equal(state_of(*deferred), state_of(*eager));
    for (const auto& item : eager->named_parameters()) {
      EXPECT_EQ(deferred->named_parameters()[item.key()].requires_grad(), item.value().requires_grad());
    }
  }
}

}  // namespace
}  // namespace tessera::testing::deferred_init_test
