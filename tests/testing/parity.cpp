#include "tests/testing/parity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tests/testing/default_device.h"
#include "tests/testing/transports.h"

namespace tessera::testing {
namespace {

/// The tensors without repetition; tied parameters are registered more than once.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) {
    if (std::ranges::none_of(result, [&](const auto& known) { return known.is_same(tensor); })) result.push_back(tensor);
  }
  return result;
}

void average_gradients(const torch::nn::Module& module, const Communicator& group) {
  for (const auto& parameter : distinct(module.parameters())) {
    if (!parameter.grad().defined()) continue;
    auto gradient = parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad().clone(at::MemoryFormat::Contiguous);
    group.all_reduce(gradient, {.op = Reduce::Mean}).wait();
    // In the memory format of the parameter, because kernels round differently if the formats of their operands differ.
    parameter.mutable_grad() = at::empty_like(parameter.detach()).copy_(gradient);
  }
}

/// The backward pass of one of `passes`, with replicated parameters.
void backward_replicated(const torch::nn::Module& module, const Mesh& mesh, const at::Tensor& loss, const Passes& passes, bool last) {
  const auto parameters = distinct(module.parameters());
  std::vector<at::Tensor> before;
  for (const auto& parameter : parameters) before.push_back(std::exchange(parameter.mutable_grad(), {}));
  loss.backward();
  for (const auto& parameter : parameters) {
    const bool is_zero = passes.unused == UnusedParameters::Zeros && parameter.requires_grad() && !parameter.grad().defined();
    if (is_zero) parameter.mutable_grad() = at::zeros_like(parameter.detach());
  }
  const auto add_before = [&] {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); i++) {
      const auto earlier = std::exchange(before[i], {});
      auto& gradient = parameters[i].mutable_grad();
      if (earlier.defined()) gradient = gradient.defined() ? earlier + gradient : earlier;
    }
  };
  const bool meets_once = passes.meets == Meets::InTheLastPass || passes.meets == Meets::AfterTheLastPass;
  if (meets_once) add_before();
  if (!meets_once || last) average_gradients(module, mesh.shard());
  if (passes.meets == Meets::ShardGroupInEachPass) add_before();
  if (passes.meets == Meets::InEachPass || last) average_gradients(module, mesh.replicate());
  add_before();
}

void backward_sharded(torch::nn::Module& module, const at::Tensor& loss, const Passes& passes, bool last) {
  std::optional<NoSync> guard;
  if (passes.meets == Meets::AfterTheLastPass || (passes.meets == Meets::InTheLastPass && !last)) guard.emplace(no_sync(module));
  if (passes.meets == Meets::ShardGroupInEachPass) set_requires_all_reduce(module, last ? Required::Yes : Required::No);
  loss.backward();
  if (passes.meets != Meets::InEachPass && last) sync_gradients(module);  // for parameters that the last pass did not use
}

}  // namespace

void as_one_unit(const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
  fully_shard(model, {.mesh = world});
}

void nested(const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
  for (const auto& child : model->children()) fully_shard(child, {.mesh = world});
  fully_shard(model, {.mesh = world});
}

std::shared_ptr<TrainedModel> seeded(const MakeModel& make) {
  static std::mutex generator;
  std::lock_guard lock(generator);
  torch::manual_seed(1);
  return make();
}

Trained train(const Communicator& world, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard,
              const Passes& passes) {
  auto model = seeded(make);
  const Mesh mesh(world, {.replicate = passes.replicas, .shard = world.size() / passes.replicas});
  if (shard) shard(model, world);
  const auto own = shard ? parameters(*model) : distinct(model->parameters());
  const auto steps_with = optimizer(own);
  auto batches = seeded_generator(static_cast<uint64_t>(world.rank()) + 17);
  Trained result;
  for (int step = 0; step < steps; step++) {
    for (int pass = 1; pass <= passes.count; pass++) {
      const auto loss = model->loss(batches);
      if (shard) {
        backward_sharded(*model, loss, passes, pass == passes.count);
      } else {
        backward_replicated(*model, mesh, loss, passes, pass == passes.count);
      }
      result.losses.push_back(loss.item<double>());
    }
    steps_with->step();
    model->after_step(own);
    steps_with->zero_grad();
  }
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : own) result.parameters.push_back(shard ? full_parameter(parameter) : parameter.detach().clone());
  return result;
}

void expect_parity(int ranks, const MakeModel& make, const MakeOptimizer& optimizer, int steps, const Shard& shard, const Passes& passes,
                   double tolerance) {
  run_world({.transport = "threads", .ranks = ranks, .host_of = passes.host_of}, [&](const Communicator& world) {
    const auto expected = train(world, make, optimizer, steps, {}, passes);
    const auto actual = train(world, make, optimizer, steps, shard, passes);
    ASSERT_EQ(actual.losses.size(), expected.losses.size());
    for (size_t i = 0; i < actual.losses.size(); i++) {
      ASSERT_LE(std::abs(actual.losses[i] - expected.losses[i]), tolerance) << "loss " << i << ", rank " << world.rank() << " of " << ranks;
    }
    ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
    for (size_t i = 0; i < actual.parameters.size(); i++) {
      ASSERT_EQ(actual.parameters[i].sizes(), expected.parameters[i].sizes());
      EXPECT_TRUE(at::allclose(actual.parameters[i], expected.parameters[i], 0, tolerance))
          << "parameter " << i << ", rank " << world.rank() << " of " << ranks;
    }
  });
}

}  // namespace tessera::testing
