// Training with PyTorch's FSDP2 and with Tessera, on two ranks each, gives the same losses and gradient norms in every step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "tessera/base/process.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/testing/net.h"
#include "tessera/testing/numbers.h"

namespace tessera::testing::pytorch_test {
namespace {

namespace nn = torch::nn;

struct Step {
  double loss = 0, norm = 0;
};
using Steps = std::vector<Step>;

/// What tests/pytorch/fsdp2.py prints, by dtype. Run once for all tests.
const std::map<std::string, Steps>& pytorch() {
  static const auto result = [] {
    Process process({TESSERA_TEST_PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TESSERA_TEST_SCRIPT},
                    {{"OMP_NUM_THREADS", "1"}}, Process::Output::Capture);
    const auto output = process.read_output();
    EXPECT_EQ(process.wait(std::chrono::seconds(10)), 0) << output;
    std::map<std::string, Steps> steps;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string dtype;
      Step step;
      if (words >> dtype >> step.loss >> step.norm && (dtype == "float32" || dtype == "bfloat16")) steps[dtype].push_back(step);
    }
    EXPECT_EQ(steps["float32"].size(), 10) << output;
    EXPECT_EQ(steps["bfloat16"].size(), 10) << output;
    return steps;
  }();
  return result;
}

struct Twin : nn::Module {
  nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
  nn::LayerNorm norm{nullptr};
  Twin() {
    first = register_module("first", nn::Linear(8, 32));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({32})));
    second = register_module("second", nn::Linear(32, 32));
    last = register_module("last", nn::Linear(32, 4));
    fill_with_numbers(*this, 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(second(norm(torch::tanh(first(x)))))); }
};

Steps train(const Communicator& world, const MixedPrecision& precision) {
  const auto net = std::make_shared<Twin>();
  const ShardOptions options{.mesh = world, .mixed_precision = precision};
  fully_shard(net->first, options);
  fully_shard(net->second, options);
  fully_shard(net, options);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  Steps steps;
  for (int step = 0; step < 10; step++) {
    const double shift = 10 * step + world.rank();
    const auto output = net->forward(numbers({6, 8}, shift)).to(at::kFloat);
    const auto loss = (output - numbers({6, 4}, shift + 5)).pow(2).mean();
    loss.backward();
    const auto norm = clip_grad_norm(net->parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
    const auto mean = loss.detach().clone();
    world.all_reduce(mean, {.op = Reduce::Mean}).wait();
    steps.push_back({.loss = mean.item<double>(), .norm = norm.item<double>()});
  }
  return steps;
}

void expect_near(const Steps& actual, const Steps& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); i++) {
    EXPECT_NEAR(actual[i].loss, expected[i].loss, tolerance * expected[i].loss) << "step " << i;
    EXPECT_NEAR(actual[i].norm, expected[i].norm, tolerance * expected[i].norm) << "step " << i;
  }
}

TEST(PyTorch, TrainsTheSame) {
  with_ranks(2, [expected = pytorch().at("float32")](const Communicator& world) { expect_near(train(world, {}), expected, 1e-5); });
}

TEST(PyTorch, TrainsTheSameInMixedPrecision) {
  at::set_num_threads(1);  // as there: in bfloat16 the order of sums shows
  with_ranks(2, [expected = pytorch().at("bfloat16")](const Communicator& world) {
    const auto actual = train(world, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    expect_near(actual, expected, 1e-4);
    // Which says something, because bfloat16 moves the numbers more than that.
    EXPECT_GT(std::abs(actual[8].norm - pytorch().at("float32")[8].norm), 1e-3);
  });
}

}  // namespace
}  // namespace tessera::testing::pytorch_test
