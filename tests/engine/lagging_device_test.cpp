// Whole sharded steps over the collectives of a backend, on a device whose streams lag. Nobody waits on the host, so what does not wait for
// another stream computes with what is not there yet: a wrong number.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/tessera.h"
#include "tessera/testing/careless.h"
#include "tessera/testing/delayed_device.h"

namespace tessera::testing::lagging_device_test {
namespace {

const auto kDevice = delayed_device();  // before the autograd engine counts devices

void move_to_device(const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (const auto& value : module.parameters()) value.unsafeGetTensorImpl()->shallow_copy_from(value.to(kDevice).getIntrusivePtr());
}

/// The parameters after some steps.
at::Tensor trained(Forgets forgets, Current current = Current::First) {
  torch::manual_seed(1);
  auto model = torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8), torch::nn::Tanh(),
                                     torch::nn::Linear(8, 8));
  move_to_device(*model);
  const auto world = world_on_delayed_device(forgets);
  for (const auto& layer : *model) {
    if (layer.ptr()->as<torch::nn::Linear>() != nullptr) fully_shard(layer.ptr(), {.mesh = world});
  }
  fully_shard(model, {.mesh = world});
  optim::SGD optimizer(model->parameters(), {.lr = 0.1});
  const auto batch = at::arange(32, at::kFloat).view({4, 8}).sin().to(kDevice);
  for (int step = 0; step < 3; step++) {
    model->forward(batch).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  run_all(current);
  std::vector<at::Tensor> values;
  for (const auto& value : model->parameters()) values.push_back(to_local(value).flatten().cpu());
  return at::cat(values);
}

class LaggingDevice : public ::testing::Test {
 protected:
  LaggingDevice() { set_lags(true); }
  ~LaggingDevice() override { run_all(); }
};

TEST_F(LaggingDevice, TrainsToTheSameBits) {
  set_lags(false);
  const auto expected = trained(Forgets::Nothing);
  set_lags(true);
  for (const auto current : {Current::First, Current::Last}) EXPECT_TRUE(at::equal(trained(Forgets::Nothing, current), expected));
  EXPECT_FALSE(at::equal(trained(Forgets::Results), expected)) << "parameters are read before they are there";
  EXPECT_FALSE(at::equal(trained(Forgets::Inputs, Current::Last), expected)) << "gradients are added before they are there";
  EXPECT_FALSE(at::equal(trained(Forgets::Memory), expected)) << "memory is written again before it has been read";
}

}  // namespace
}  // namespace tessera::testing::lagging_device_test
