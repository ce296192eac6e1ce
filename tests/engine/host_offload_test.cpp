// Shards, gradients and optimizer state in host memory, of units on a device whose streams lag: a missing wait for a copy gives wrong
// numbers, and waits of the host are counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/tessera.h"
#include "tessera/train/sharding_settings.h"
#include "tests/testing/careless.h"
#include "tests/testing/delayed_device.h"
#include "tests/testing/transports.h"

namespace tessera::testing::host_offload_test {
namespace {

using ::testing::HasSubstr;

const auto kDevice = delayed_device();  // before the autograd engine counts devices

torch::nn::Sequential seeded_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8), torch::nn::Tanh(),
                               torch::nn::Linear(8, 8));
}

at::Tensor batch(int seed = 0) {
  return at::arange(seed, 32 + seed, at::kFloat).view({4, 8}).sin().to(kDevice);
}

torch::nn::Sequential sharded(const ShardOptions& options) {
  auto model = seeded_model();
  if (options.offload.parameters == OffloadTo::Nowhere) {
    const torch::NoGradGuard no_grad;
    for (const auto& value : model->parameters()) value.unsafeGetTensorImpl()->shallow_copy_from(value.to(kDevice).getIntrusivePtr());
  }
  for (const auto& layer : *model) {
    if (layer.ptr()->as<torch::nn::Linear>() != nullptr) fully_shard(layer.ptr(), options);
  }
  fully_shard(model, options);
  return model;
}

at::Tensor values_of(const torch::nn::Sequential& model) {
  std::vector<at::Tensor> values;
  for (const auto& value : model->parameters()) values.push_back(to_local(value).flatten().cpu());
  return at::cat(values);
}

using Step = std::function<void(torch::nn::Sequential& model, optim::Optimizer& optimizer)>;

void step_once(torch::nn::Sequential& model, optim::Optimizer& optimizer) {
  model->forward(batch()).square().mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

const OffloadOptions kToHost = {.parameters = OffloadTo::Host};

/// The parameters after some steps.
at::Tensor trained(ShardOptions options, const Step& step = step_once, Current current = Current::First) {
  auto model = sharded(options);
  optim::SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9});
  optimizer.offload_state(options.offload.parameters);
  for (int i = 0; i < 3; i++) step(model, optimizer);
  run_all(current);
  return values_of(model);
}

class HostOffload : public ::testing::Test {
 protected:
  HostOffload() { set_lags(true); }
  ~HostOffload() override {
    run_all();
    set_lags(true);
  }

  /// Expects the same training with shards in host memory as with shards on the device, and the same bits however late the device is.
  void expect_same(ShardOptions options, const Step& step = step_once) {
    set_lags(false);
    const auto on_device = trained(options, step);
    options.offload = kToHost;
    const auto expected = trained(options, step);
    EXPECT_TRUE(at::allclose(expected, on_device, 1e-5, 1e-6)) << expected << on_device;
    set_lags(true);
    for (const auto current : {Current::First, Current::Last}) EXPECT_TRUE(at::equal(trained(options, step, current), expected));
  }

  const Communicator world_ = world_on_delayed_device(Forgets::Nothing);
};

TEST_F(HostOffload, TrainsToTheSameBits) {
  expect_same({.mesh = world_});
}

TEST_F(HostOffload, TrainsInMixedPrecision) {
  expect_same({.mesh = world_, .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
}

TEST_F(HostOffload, TrainsWithClippedGradients) {
  for (const bool in_step : {false, true}) {
    expect_same({.mesh = world_}, [&](torch::nn::Sequential& model, optim::Optimizer& optimizer) {
      model->forward(batch()).square().mean().backward();
      const auto norm = in_step ? optimizer.clip_grad_norm(0.01) : clip_grad_norm(model->parameters(), 0.01);
      EXPECT_GT(norm.item<double>(), 0.02);
      optimizer.step();
      optimizer.zero_grad();
    });
  }
}

TEST_F(HostOffload, AccumulatesGradients) {
  for (const bool syncs : {false, true}) {
    expect_same({.mesh = world_}, [&](torch::nn::Sequential& model, optim::Optimizer& optimizer) {
      for (int pass = 0; pass < 2; pass++) {
        set_requires_gradient_sync(*model, syncs || pass == 1 ? Required::Yes : Required::No);
        model->forward(batch(pass)).square().mean().backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    });
  }
}

TEST_F(HostOffload, StepsInBackward) {
  expect_same({.mesh = world_}, [&](torch::nn::Sequential& model, optim::Optimizer& optimizer) {
    optimizer.step_in_backward();
    model->forward(batch()).square().mean().backward();
    optimizer.step();
  });
}

TEST_F(HostOffload, WaitsOnceInAStep) {
  auto model = sharded({.mesh = world_, .offload = kToHost});
  optim::SGD optimizer(model->parameters(), {.lr = 0.1});
  for (int step = 0; step < 3; step++) {
    const auto before = host_waits();
    const auto loss = model->forward(batch()).square().mean();
    EXPECT_EQ(host_waits(), before) << "a copy to the device made the host wait";
    loss.backward();
    EXPECT_EQ(host_waits(), before + 1);
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(host_waits(), before + 1) << "the gradients are there, so the shards have been read";
  }
}

TEST_F(HostOffload, KeepsShardsAndGradientsInPinnedMemory) {
  auto model = sharded({.mesh = world_, .offload = kToHost});
  model->forward(batch()).square().mean().backward();
  for (const auto& shard : model->parameters()) {
    EXPECT_TRUE(shard.is_cpu());
    EXPECT_TRUE(shard.grad().is_cpu());
    if (shard.numel() == 0) continue;  // the other rank has all of it
    EXPECT_TRUE(is_pinned(shard.const_data_ptr()));
    EXPECT_TRUE(is_pinned(shard.grad().const_data_ptr()));
  }
  EXPECT_EQ(model[0]->as<torch::nn::Linear>()->weight.device(), kDevice);
  EXPECT_THAT(describe(*model), HasSubstr("gathered, host"));
}

TEST_F(HostOffload, WritesShardsOnlyWhenTheyHaveBeenRead) {
  auto model = sharded({.mesh = world_, .offload = kToHost});
  const torch::NoGradGuard no_grad;
  const auto expected = model->forward(batch()).cpu();
  const auto result = model->forward(batch());
  for (const auto& shard : model->parameters()) shard.add_(1);
  EXPECT_TRUE(at::equal(result.cpu(), expected));
  EXPECT_FALSE(at::equal(model->forward(batch()).cpu(), expected));
}

TEST_F(HostOffload, GathersAndLoadsWholeParameters) {
  auto model = sharded({.mesh = world_, .offload = kToHost});
  const auto shard = model->parameters().front();
  EXPECT_EQ(full_parameter(shard).device(), kDevice);
  EXPECT_EQ(full_parameter(shard).sizes(), at::IntArrayRef({8, 8}));
  {
    const auto whole = full_params(*model, Access::Write);
    const torch::NoGradGuard no_grad;
    model[0]->as<torch::nn::Linear>()->weight.fill_(3);
  }
  EXPECT_TRUE(at::equal(to_local(shard), at::full_like(to_local(shard), 3.0F)));
  model->forward(batch()).square().mean().backward();
  EXPECT_TRUE(at::equal(full_grad(shard).cpu().flatten().narrow(0, 0, shard.numel()), to_local(shard.grad()).flatten()));
}

TEST_F(HostOffload, IsWhatConfigurationsAskFor) {
  config::Settings settings;
  settings.set("distributed_type", "FSDP", config::Origin::Code, "here");
  settings.set("fsdp_offload_params", "true", config::Origin::Code, "here");
  EXPECT_EQ(train::sharding_of(settings, *seeded_model(), world_).options.offload.parameters, OffloadTo::Host);
}

TEST_F(HostOffload, SaysWhatCannotGoToTheHost) {
  const auto refused = [&](const ShardOptions& options) { return message_of<ConfigError>([&] { sharded(options); }); };
  EXPECT_THAT(refused({.mesh = world_, .offload = {.gradients = OffloadTo::Host}}), HasSubstr("OffloadOptions::parameters"));
  EXPECT_THAT(refused({.mesh = world_, .offload = {.parameters = OffloadTo::Host, .gradients = OffloadTo::Disk}}),
              HasSubstr("leave OffloadOptions::gradients out"));
  EXPECT_THAT(refused({.mesh = world_, .residence = Residence::NodeShared, .offload = kToHost}), HasSubstr("ShardOptions::residence"));
  auto model = sharded({.mesh = world_});
  optim::SGD optimizer(model->parameters(), {.lr = 0.1});
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.offload_state(OffloadTo::Host); }), HasSubstr("OffloadOptions::parameters"));
}

}  // namespace
}  // namespace tessera::testing::host_offload_test
