// Adapters on quantised weights on XLA devices have the values of the CPU's kernels, and train as on ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/move_module.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/xla/init.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"

namespace tessera::xla::adapters_test {
namespace {

using nn::Quantization;
using testing::numbers;

constexpr Quantization kAll[] = {Quantization::Nf4, Quantization::Nf4Single, Quantization::Int8, Quantization::Fp8};
constexpr int kDevices = 2;

const Communicator& world() {
  static const auto devices = init({.devices = kDevices});
  return devices;
}

TEST(QuantizedWeights, HaveTheValuesOfTheHost) {
  torch::manual_seed(1);
  const auto weight = at::randn({70, 259});
  const auto device = world().traits().device;
  for (const auto kind : kAll) {
    const auto held = nn::quantized(kind, weight);
    const auto expected = nn::dequantized(kind, held, weight.sizes(), at::kFloat);
    const auto values = nn::dequantized(kind, held.to(device), weight.sizes(), at::kFloat).cpu();
    // A compiler may fuse NF4's scale of the scales with the addition of their mean.
    EXPECT_TRUE(kind == Quantization::Nf4 ? at::allclose(values, expected, 1e-6, 1e-8) : at::equal(values, expected)) << nn::name_of(kind);
    EXPECT_TRUE(at::equal(nn::quantized(kind, weight.to(device)).cpu(), held)) << nn::name_of(kind);
  }
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(24, 40)), down = register_module("down", torch::nn::Linear(40, 24));
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::relu(up(x))); }
};
TORCH_MODULE(Net);

/// Returns the losses of all ranks together.
std::vector<double> trained(const Communicator& world, Quantization kind, bool dora) {
  torch::manual_seed(5);
  Net net;
  testing::fill_with_numbers(*net);
  nn::quantize(net, {.quantization = kind});
  lora::apply(net, {.r = 4, .use_dora = dora});
  move_module(*net, world.traits().device);
  fully_shard(net, {.mesh = world});
  optim::AdamW optimizer(parameters(net), {.lr = 0.01});
  std::vector<double> losses;
  for (int step = 0; step < 3; step++) {
    const auto loss = net(numbers({4, 24}, step).to(world.traits().device)).pow(2).mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.detach().cpu().item<double>());
  }
  return losses;
}

TEST(Adapters, TrainOnXlaDevicesAsOnRanks) {
  for (const auto kind : {Quantization::Nf4, Quantization::Int8}) {
    for (const bool dora : {false, true}) {
      std::vector<double> expected;
      testing::run_world({.transport = "threads", .ranks = 1}, [&](const Communicator& alone) { expected = trained(alone, kind, dora); });
      const auto losses = trained(world(), kind, dora);
      for (size_t i = 0; i < losses.size(); i++) EXPECT_NEAR(losses[i], expected[i], 1e-5) << nn::name_of(kind) << " " << i;
    }
  }
}

}  // namespace
}  // namespace tessera::xla::adapters_test
