// Recurrent layers, which PyTorch's OpInfo lacks: values and gradients as on the CPU, and no operator runs there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/kernels.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

/// The layer's output, and the gradients of its input and its parameters.
template <class Layer>
std::vector<at::Tensor> results_of(Layer& layer, const at::Tensor& given) {
  const auto x = given.detach().requires_grad_();
  const auto output = std::get<0>(layer->forward(x));
  output.pow(2).sum().backward();
  std::vector<at::Tensor> results{output.detach(), x.grad()};
  for (const auto& parameter : layer->parameters()) results.push_back(parameter.grad());
  return results;
}

template <class Layer>
void expect_same(const std::function<Layer()>& make) {
  const auto on = device_for_tests();
  torch::manual_seed(1);
  auto here = make();
  torch::manual_seed(1);
  auto there = make();
  to_device(*there);
  const auto x = torch::randn({3, 5, 4});
  const auto expected = results_of(here, x), actual = results_of(there, x.to(on));
  for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::allclose(actual[i].cpu(), expected[i], 1e-4, 1e-5)) << i << actual[i] << expected[i];
  for (const auto& [name, calls] : metrics().fallbacks) ADD_FAILURE() << name << " ran on the CPU";
}

TEST(Recurrent, Lstm) {
  expect_same<torch::nn::LSTM>([] { return torch::nn::LSTM(torch::nn::LSTMOptions(4, 6).num_layers(2).bidirectional(true)); });
}

TEST(Recurrent, LstmWithoutBiasWithAProjection) {
  expect_same<torch::nn::LSTM>([] { return torch::nn::LSTM(torch::nn::LSTMOptions(4, 6).bias(false).batch_first(true).proj_size(2)); });
}

TEST(Recurrent, Gru) {
  expect_same<torch::nn::GRU>([] { return torch::nn::GRU(torch::nn::GRUOptions(4, 6).num_layers(2)); });
}

TEST(Recurrent, PlainLayers) {
  expect_same<torch::nn::RNN>([] { return torch::nn::RNN(torch::nn::RNNOptions(4, 6)); });
}

}  // namespace
}  // namespace tessera::xla
