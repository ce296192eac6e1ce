// Attention and its gradients, against the CPU's.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

struct Attention {
  const char* name;
  int64_t queries = 7, keys = 7;
  bool causal = false;
  at::Tensor mask = {};
  std::optional<double> scale = {};
  at::ScalarType dtype = at::kFloat;
};

at::Tensor hidden_keys() {
  auto seen = torch::ones({2, 1, 7, 7}, torch::kBool);
  seen.index_put_({1, 0, torch::indexing::Slice(), torch::indexing::Slice(4, 7)}, false);
  seen.index_put_({0, 0, 3}, false);  // this query sees nothing
  return seen;
}

std::vector<Attention> attentions() {
  return {
      {.name = "Plain"},
      {.name = "Causal", .causal = true},
      {.name = "CausalWithMoreKeys", .keys = 9, .causal = true},
      {.name = "CausalWithMoreQueries", .queries = 9, .causal = true},
      {.name = "Scaled", .scale = 0.3},
      {.name = "WithABias", .mask = torch::linspace(-2, 2, 49).view({7, 7})},
      {.name = "WithHiddenKeys", .mask = hidden_keys()},
      {.name = "InBf16", .causal = true, .dtype = at::kBFloat16},
  };
}

std::vector<at::Tensor> attended(const Attention& which, at::Device device) {
  torch::manual_seed(1);
  std::vector<at::Tensor> inputs;
  for (const auto length : {which.queries, which.keys, which.keys}) {
    inputs.push_back(torch::randn({2, 3, length, 4}).to(which.dtype).to(device).requires_grad_());
  }
  std::optional<at::Tensor> mask;
  if (which.mask.defined()) mask = which.mask.to(device);
  const auto operators = device.type() == at::kCPU ? 0 : metrics().operators;
  const auto out = at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask, 0.0, which.causal, which.scale);
  if (device.type() != at::kCPU && !mask) {
    EXPECT_EQ(metrics().operators, operators + 1);
  }
  (out * torch::arange(out.numel(), torch::kFloat).view(out.sizes()).div(100).to(which.dtype).to(device)).sum().backward();
  std::vector<at::Tensor> all{out.detach()};
  for (const auto& input : inputs) all.push_back(input.grad());
  if (device.type() != at::kCPU) step_boundary();
  for (auto& tensor : all) tensor = tensor.cpu().to(at::kFloat);
  return all;
}

class Attentions : public ::testing::TestWithParam<Attention> {};
INSTANTIATE_TEST_SUITE_P(All, Attentions, ::testing::ValuesIn(attentions()), [](const auto& info) { return info.param.name; });

TEST_P(Attentions, AreThoseOfTheCpu) {
  const auto device = device_for_tests();
  const auto fell_back = metrics().fallbacks.size();
  const auto expected = attended(GetParam(), at::kCPU), actual = attended(GetParam(), device);
  const double tolerance = GetParam().dtype == at::kFloat ? 1e-5 : 0.03;  // three roundings of bf16
  for (size_t i = 0; i < expected.size(); i++) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], tolerance, tolerance)) << i << "\n" << (actual[i] - expected[i]).abs().max();
  }
  EXPECT_EQ(metrics().fallbacks.size(), fell_back) << metrics_report();
}

}  // namespace
}  // namespace tessera::xla
