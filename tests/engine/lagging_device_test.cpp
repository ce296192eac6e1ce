// Whole sharded steps over the collectives of a backend, on a device whose streams lag. The host never waits, so a missing wait between
// streams gives a wrong number.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/tessera.h"
#include "tests/testing/careless.h"
#include "tests/testing/delayed_device.h"
#include "tests/testing/transports.h"

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

/// Runs one unit on two streams of a program, and the next units on one of them, and returns the results.
at::Tensor read_by_two_streams(Current other_runs) {
  torch::manual_seed(1);
  torch::nn::ModuleList layers;
  for (int i = 0; i < 4; i++) layers->push_back(torch::nn::Linear(8, 8));
  move_to_device(*layers);
  const auto world = world_on_delayed_device(Forgets::Nothing);
  for (const auto& layer : *layers) fully_shard(layer, {.mesh = world});
  const auto batch = at::arange(32, at::kFloat).view({4, 8}).sin().to(kDevice);
  const torch::NoGradGuard no_grad;
  const auto used = [&](size_t layer) { return batch.mm(layers[layer]->as<torch::nn::Linear>()->weight); };
  const auto other = new_stream();
  std::vector<at::Tensor> results = {used(0)};
  {
    const c10::StreamGuard on_other(other);
    results.push_back(used(0));
  }
  for (size_t layer = 1; layer < 4; layer++) results.push_back(used(layer));
  {
    const c10::StreamGuard on_other(other);
    run_all(other_runs);
  }
  run_all();
  return at::cat(results).cpu();
}

TEST_F(LaggingDevice, WaitsForAUnitOnEachStreamThatReadsIt) {
  set_lags(false);
  const auto expected = read_by_two_streams(Current::First);
  set_lags(true);
  for (const auto other : {Current::First, Current::Last}) EXPECT_TRUE(at::equal(read_by_two_streams(other), expected));
}

TEST_F(LaggingDevice, SaysForWhichUnitThereIsNoRoom) {
  set_lags(false);
  const torch::NoGradGuard no_grad;
  const auto batch = at::ones({1, 64}).to(kDevice);
  const auto result = [&](std::string* error) {
    torch::manual_seed(1);
    auto model = torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
    move_to_device(*model);
    const auto world = world_on_delayed_device(Forgets::Nothing);
    for (const auto& layer : *model) fully_shard(layer.ptr(), {.mesh = world});
    if (error != nullptr) {
      set_room(bytes_in_use() + 4 * 64 * 80);  // enough for one layer, and not for two
      *error = message_of<IoError>([&] { model->forward(batch); });
      set_room(std::numeric_limits<size_t>::max());
    }
    return model->forward(batch).cpu();
  };
  std::string error;
  EXPECT_TRUE(at::equal(result(&error), result(nullptr))) << "the model goes on";
  EXPECT_THAT(error,
              ::testing::MatchesRegex(".* has no room for 18432 bytes of unit '.*', while 18432 bytes of unsharded parameters are there"
                                      ".*max_live_units = 1.*libtorch says: the delayed device has no room for 18432 bytes.*"));
}

}  // namespace
}  // namespace tessera::testing::lagging_device_test
