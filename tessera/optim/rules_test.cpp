// The rules of Tessera's optimizers, compared with torch's or with the rule written with tensors: unsharded and sharded, in each unit
// memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adagrad.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::rules_test {
namespace {

using Tensors = std::vector<at::Tensor>;
/// Takes a step of one parameter; `step` counts from 1.
using Rule = std::function<void(at::Tensor& parameter, const at::Tensor& gradient, std::map<std::string, at::Tensor>& state, int step)>;
using Make = std::function<std::unique_ptr<optim::Optimizer>(Tensors)>;

struct Case {
  std::string name;
  Make make;
  Rule rule;
  friend std::ostream& operator<<(std::ostream& out, const Case& self) { return out << self.name; }
};

at::Tensor& moment(std::map<std::string, at::Tensor>& state, const std::string& name, const at::Tensor& like) {
  auto& tensor = state[name];
  if (!tensor.defined()) tensor = at::zeros_like(like);
  return tensor;
}

/// The update of Adam, without a learning rate.
at::Tensor adam_update(const at::Tensor& g, std::map<std::string, at::Tensor>& state, int step, double beta2, double eps) {
  auto& first = moment(state, "exp_avg", g).mul_(0.9).add_(g, 0.1);
  auto& second = moment(state, "exp_avg_sq", g).mul_(beta2).add_(g * g, 1 - beta2);
  return first / (1 - std::pow(0.9, step)) / ((second / (1 - std::pow(beta2, step))).sqrt() + eps);
}

const Case kCases[] = {
    {"Sgd", [](Tensors p) { return std::make_unique<optim::SGD>(p, optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}); },
     [](at::Tensor& p, const at::Tensor& g, auto& state, int) {
       auto& momentum = moment(state, "momentum_buffer", g).mul_(0.9).add_(g + 0.1 * p);
       p.sub_(momentum, 0.1);
     }},
    {"AdamW", [](Tensors p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.01}); },
     [](at::Tensor& p, const at::Tensor& g, auto& state, int step) {
       p.mul_(1 - 0.01 * 0.01).sub_(adam_update(g, state, step, 0.999, 1e-8), 0.01);
     }},
    {"Adagrad",
     [](Tensors p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions{.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.01}); },
     [](at::Tensor& p, const at::Tensor& gradient, auto& state, int step) {
       const auto g = gradient + 0.01 * p;
       auto& sum = moment(state, "sum", g).add_(g * g);
       p.sub_(g / (sum.sqrt() + 1e-10), 0.1 / (1 + 0.1 * (step - 1)));
     }},
    {"Lion", [](Tensors p) { return std::make_unique<optim::Lion>(p, optim::LionOptions{.lr = 0.01, .weight_decay = 0.1}); },
     [](at::Tensor& p, const at::Tensor& g, auto& state, int) {
       auto& momentum = moment(state, "exp_avg", g);
       p.mul_(1 - 0.01 * 0.1).sub_((0.9 * momentum + 0.1 * g).sign(), 0.01);
       momentum.mul_(0.99).add_(g, 0.01);
     }},
    {"Lamb", [](Tensors p) { return std::make_unique<optim::Lamb>(p, optim::LambOptions{.lr = 0.1, .weight_decay = 0.1}); },
     [](at::Tensor& p, const at::Tensor& g, auto& state, int step) {
       const auto update = adam_update(g, state, step, 0.999, 1e-6) + 0.1 * p;
       p.sub_(update * (p.norm() / update.norm()), 0.1);
     }},
};

class Rules : public ::testing::TestWithParam<Case> {};

TEST_P(Rules, AreWhatTheySay) {
  torch::manual_seed(3);
  Tensors ours, theirs;
  for (const int64_t numel : {7, 1, 30, 5000}) {
    ours.push_back(torch::randn({numel, 2}));
    theirs.push_back(ours.back().clone());
    ours.back().set_requires_grad(true);
  }
  const auto optimizer = GetParam().make(ours);
  std::vector<std::map<std::string, at::Tensor>> state(ours.size());
  for (int step = 1; step <= 8; step++) {
    for (size_t i = 0; i < ours.size(); i++) {
      ours[i].mutable_grad() = torch::randn_like(ours[i]);
      GetParam().rule(theirs[i], ours[i].grad() * 0.5, state[i], step);
    }
    optimizer->scale_gradients(at::full({}, 0.25));
    optimizer->scale_gradients(at::full({}, 2.0));
    optimizer->step();
  }
  for (size_t i = 0; i < ours.size(); i++) EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-5, 1e-5)) << i;
}

/// The whole parameters of a model of three layers after some steps.
Tensors learnt(const Communicator& world, const Make& make, const ShardOptions* options) {
  auto net = seeded_net();
  if (options != nullptr) {
    for (const auto& child : net->children()) fully_shard(child, *options);
  }
  const auto optimizer = make(options != nullptr ? parameters(*net) : net->parameters());
  for (int step = 0; step < 6; step++) {
    net(input() + step).pow(2).mean().backward();
    const double most = on_cpu() ? 0.05 : 0.01;  // another device draws other parameters
    EXPECT_GT(optimizer->clip_grad_norm(most).item<double>(), most);
    optimizer->step();
    optimizer->zero_grad();
    world.barrier();
  }
  Tensors result;
  if (options == nullptr) {
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach());
  } else {
    for (const auto& parameter : parameters(*net)) result.push_back(full_parameter(parameter));
  }
  return result;
}

TEST_P(Rules, AreTheSameForShards) {
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      const auto expected = learnt(world, GetParam().make, nullptr);
      for (const auto residence : residences()) {
        const ShardOptions options{.mesh = world, .residence = residence};
        const auto actual = learnt(world, GetParam().make, &options);
        for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << ranks << " " << i;
      }
    });
  }
}

TEST_P(Rules, WriteTheNarrowCopyAlong) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    with_ranks(2, [&](const Communicator& world) {
      const ShardOptions gathered{.mesh = world, .mixed_precision = {.param_dtype = dtype}, .residence = Residence::Gathered};
      auto shared = gathered;
      shared.residence = Residence::NodeShared;
      const auto expected = learnt(world, GetParam().make, &gathered), actual = learnt(world, GetParam().make, &shared);
      for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i << " " << dtype;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(, Rules, ::testing::ValuesIn(kCases), ::testing::PrintToStringParamName());

/// Compares with the same rule in double: rounding errors are random, and must not add up.
template <class Reference, class ReferenceOptions>
void expect_no_bias(const std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>& make,
                    const ReferenceOptions& options) {
  torch::manual_seed(4);
  auto ours = torch::randn({4096}).set_requires_grad(true);
  auto reference = ours.detach().to(at::kDouble).set_requires_grad(true);
  const auto optimizer = make({ours});
  Reference other({reference}, options);
  const auto before = reference.detach().clone();
  for (int step = 0; step < 3; step++) {
    ours.mutable_grad() = torch::randn({4096});
    reference.mutable_grad() = ours.grad().to(at::kDouble);
    optimizer->step();
    other.step();
  }
  const auto update = reference.detach() - before;
  const auto off = ((ours.detach().to(at::kDouble) - reference.detach()) * update.sign()).mean() / update.abs().mean();
  EXPECT_LT(std::abs(off.item<double>()), on_cpu() ? 5e-7 : 1e-6);
}

TEST(Rounding, GivesNoStepThatIsTooLong) {
  using torch::optim::AdamOptions, torch::optim::AdamWOptions;
  expect_no_bias<torch::optim::AdamW>([](auto p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.01}); },
                                      AdamWOptions(0.01));
  expect_no_bias<torch::optim::Adam>([](auto p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.01}); },
                                     AdamOptions(0.01));
}

TEST(Factors, AreForgottenWithTheStepThatTheyWereFor) {
  auto weight = at::ones({4}).set_requires_grad(true);
  optim::SGD optimizer({weight}, {.lr = 1});
  for (const bool skips : {true, false}) {
    weight.mutable_grad() = at::full({4}, std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isinf(optimizer.clip_grad_norm(1).item<double>()));
    if (skips) optimizer.skip_step();
    optimizer.zero_grad();
    weight.mutable_grad() = at::full({4}, 2.0);
    EXPECT_FLOAT_EQ(optimizer.clip_grad_norm(1).item<float>(), 4);
    optimizer.step();
  }
  EXPECT_TRUE(at::allclose(weight, at::zeros({4}), 0, 1e-5));  // two steps of a half each
}

TEST(Factors, MayBeTooSmallForTheDtypeOfTheGradients) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    auto weight = at::ones({4}, dtype).set_requires_grad(true);
    optim::SGD optimizer({weight}, {.lr = std::ldexp(1, 14)});
    weight.mutable_grad() = at::full({4}, std::ldexp(1, 10), dtype);
    optimizer.scale_gradients(at::full({}, std::ldexp(1, -25)));
    optimizer.step();
    EXPECT_TRUE(at::equal(weight, at::full({4}, 0.5, dtype))) << dtype;
    EXPECT_EQ(weight.grad()[0].item<float>(), 1024) << "the step has changed the gradient";
  }
}

TEST(OtherMemory, GoesThroughOperators) {
  for (const auto& test : kCases) {
    torch::manual_seed(4);
    const auto begin = torch::randn({40, 3}), gradient = torch::randn({40, 3});
    auto narrow = begin.clone().set_requires_grad(true), wide = begin.to(at::kDouble).set_requires_grad(true);
    const auto one = test.make({narrow}), other = test.make({wide});
    for (int step = 0; step < 4; step++) {
      narrow.mutable_grad() = gradient / (step + 1);
      wide.mutable_grad() = gradient.to(at::kDouble) / (step + 1);
      for (const auto* optimizer : {&one, &other}) {
        (*optimizer)->scale_gradients(at::full({}, 0.5));
        (*optimizer)->step();
      }
    }
    EXPECT_TRUE(at::allclose(narrow.to(at::kDouble), wide, 1e-5, 1e-5)) << test.name;
  }
}

TEST(Lamb, SaysWhatItCanNotDo) {
  auto gaps = at::ones({3, 2}).select(1, 0).set_requires_grad(true);
  gaps.mutable_grad() = at::ones({3});
  EXPECT_THAT(message_of<UsageError>([&] { optim::Lamb({gaps}, {}).step(); }), ::testing::HasSubstr("dense"));
}

/// The loss of a regression after some hundred steps.
double loss_with(const Make& make) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(10, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64), torch::nn::Tanh(),
                            torch::nn::Linear(64, 1));
  const auto inputs = torch::randn({256, 10}), targets = (inputs.sum(1, true) * 0.7).sin();
  const auto optimizer = make(net->parameters());
  double loss = 0;
  for (int step = 0; step < 300; step++) {
    const auto error = (net->forward(inputs) - targets).pow(2).mean();
    error.backward();
    optimizer->step();
    optimizer->zero_grad();
    loss = error.item<double>();
  }
  return loss;
}

TEST(AdamW8bit, LearnsAsWellAsAdamW) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  const auto large = loss_with([](Tensors p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 3e-3}); });
  const auto small = loss_with([](Tensors p) { return std::make_unique<optim::AdamW8bit>(p, optim::AdamWOptions{.lr = 3e-3}); });
  EXPECT_LT(large, 0.002);  // of 0.5 at the beginning
  EXPECT_LT(small, 0.002);
}

TEST(AdamW8bit, TakesTwoBytesForEachParameter) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  torch::nn::Linear layer(64, 256);
  optim::AdamW8bit optimizer(layer->parameters(), {});
  layer(torch::ones({2, 64})).sum().backward();
  optimizer.step();
  int64_t bytes = 0, values = 0;
  for (const auto& [name, state] : optimizer.state(*layer)) {
    for (const auto& [kind, tensor] : state) bytes += kind == "step" ? 0 : static_cast<int64_t>(tensor.nbytes());
  }
  values = layer->weight.numel();
  const auto of_bias = layer->bias.numel() * 8;
  EXPECT_EQ(bytes, 2 * values + values / 256 * 8 + of_bias);
  // The state can be loaded again.
  optim::AdamW8bit other(layer->parameters(), {});
  other.load_state(*layer, optimizer.state(*layer));
  EXPECT_TRUE(at::equal(other.state(*layer).at("weight").at("exp_avg_sq"), optimizer.state(*layer).at("weight").at("exp_avg_sq")));
}

TEST(Options, ThatMakeNoSenseAreNamed) {
  const std::vector<at::Tensor> parameters = {at::ones({2}).set_requires_grad(true)};
  const auto refused = [](const std::function<void()>& make, const std::string& name) {
    EXPECT_THAT(message_of<UsageError>(make), ::testing::HasSubstr("the option " + name + " of an optimizer is"));
  };
  refused([&] { optim::AdamW(parameters, {.lr = -1}); }, "lr");
  refused([&] { optim::AdamW(parameters, {.beta1 = 1.5}); }, "beta1");
  refused([&] { optim::Adam(parameters, {.beta2 = -3}); }, "beta2");
  refused([&] { optim::Adam(parameters, {.eps = -1}); }, "eps");
  refused([&] { optim::AdamW8bit(parameters, {.beta1 = 1}); }, "beta1");
  refused([&] { optim::SGD(parameters, {.momentum = -1}); }, "momentum");
  refused([&] { optim::SGD(parameters, {.weight_decay = -1}); }, "weight_decay");
  refused([&] { optim::Lion(parameters, {.beta2 = 2}); }, "beta2");
  refused([&] { optim::Lamb(parameters, {.eps = std::nan("")}); }, "eps");
  refused([&] { optim::Adagrad(parameters, {.lr_decay = -1}); }, "lr_decay");
  optim::SGD sgd(parameters, {.lr = 0.1});
  refused([&] { sgd.set_lr(-0.1); }, "lr");
  EXPECT_THAT(message_of<UsageError>([&] { sgd.scale_gradients(at::ones({2})); }), ::testing::HasSubstr("takes a scalar"));
}

}  // namespace
}  // namespace tessera::testing::rules_test
