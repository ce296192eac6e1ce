// Checkpoints of tensors on a device: a save has the values of the moment at which it began, though the host does not wait for them.
#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/tessera.h"
#include "tests/testing/careless.h"
#include "tests/testing/delayed_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/one_device.h"

namespace tessera::testing::device_checkpoint_test {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Key;

const auto kDevice = delayed_device();  // before the autograd engine counts devices

/// A training run of one rank, on the device or on the host.
struct Training {
  explicit Training(const Communicator& ranks, int seed = 1, OffloadTo shards = OffloadTo::Nowhere) : world(ranks) {
    torch::manual_seed(seed);
    model = torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 8));
    const torch::NoGradGuard no_grad;
    const auto device = world.traits().device;
    for (const auto& value : model->parameters()) value.unsafeGetTensorImpl()->shallow_copy_from(value.to(device).getIntrusivePtr());
    fully_shard(model, {.mesh = world, .offload = {.parameters = shards}});
    optimizer = std::make_unique<optim::SGD>(model->parameters(), optim::SgdOptions{.lr = 0.1, .momentum = 0.9});
  }

  void train() {
    model->forward(at::arange(32, at::kFloat).view({4, 8}).sin().to(world.traits().device)).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  checkpoint::Contents contents() { return {.model = model.ptr().get(), .optimizer = optimizer.get()}; }
  void load(const std::filesystem::path& folder) {
    auto all = contents();
    checkpoint::load(folder, all, world);
  }

  /// The shards, and the state of the optimizer.
  at::Tensor values() const {
    std::vector<at::Tensor> all;
    for (const auto& value : model->parameters()) all.push_back(to_local(value).flatten().cpu());
    for (const auto& [name, state] : optimizer->state(*model)) {
      for (const auto& [key, tensor] : state) all.push_back(tensor.flatten().cpu().to(at::kFloat));
    }
    return at::cat(all);
  }

  Communicator world;
  torch::nn::Sequential model;
  std::unique_ptr<optim::SGD> optimizer;
};

class DeviceCheckpoint : public ::testing::Test {
 protected:
  DeviceCheckpoint() { set_lags(true); }
  ~DeviceCheckpoint() override { run_all(); }

  /// Loads a checkpoint into another run, and returns that run's values.
  at::Tensor loaded(const char* name) const {
    Training run(world_, 2);
    run.load(folder_ / name);
    return run.values();
  }

  const Folder folder_;
  const Communicator world_ = world_on_delayed_device(Forgets::Nothing, 1);
};

TEST_F(DeviceCheckpoint, HasTheValuesFromBeforeAStepThatIsQueuedBehindIt) {
  Training run(world_);
  run.train();
  checkpoint::AsyncSaver saver(world_);
  for (const auto* name : {"a", "b"}) {  // the second save has the buffers of the first
    Training reference(world_);
    reference.train();
    if (name == std::string("b")) reference.train();
    const auto expected = reference.values();
    run_all();
    const auto waits = own_waits();
    saver.save(folder_ / name, run.contents());
    run.train();
    saver.poll();
    EXPECT_EQ(own_waits(), waits) << "the host has waited for the copies, or for what was queued before them";
    saver.wait();
    EXPECT_TRUE(at::equal(loaded(name), expected)) << name;
    EXPECT_FALSE(at::equal(run.values(), expected));
  }
}

TEST_F(DeviceCheckpoint, IsReadThroughPinnedMemory) {
  Training run(world_);
  run.train();
  checkpoint::save(folder_ / "a", run.contents(), world_);
  EXPECT_TRUE(at::equal(loaded("a"), run.values()));
}

TEST_F(DeviceCheckpoint, IsTheSameWhereverTheShardsLie) {
  Training first(world_);
  first.train();
  checkpoint::save(folder_ / "device", first.contents(), world_);
  Training offloaded(world_, 2, OffloadTo::Host);
  offloaded.load(folder_ / "device");
  checkpoint::save(folder_ / "host", offloaded.contents(), world_);
  Training on_cpu(self_world(), 2);
  on_cpu.load(folder_ / "host");
  checkpoint::save(folder_ / "cpu", on_cpu.contents(), on_cpu.world);
  for (const auto* name : {"device", "host", "cpu"}) EXPECT_TRUE(at::equal(loaded(name), first.values())) << name;
}

at::Tensor draw() {
  return at::rand({3}, at::globalContext().defaultGenerator(kDevice));  // a generator of the host stands for the device's
}

TEST_F(DeviceCheckpoint, KeepsTheGeneratorOfTheDevice) {
  Training run(world_), on_host(self_world());
  checkpoint::save(folder_ / "a", run.contents(), world_);
  checkpoint::save(folder_ / "without", on_host.contents(), on_host.world);
  EXPECT_EQ(checkpoint::read_run(folder_ / "a").device_generator, ".generator.delayed");
  EXPECT_THAT(checkpoint::reshard(folder_ / "a", folder_ / "two", 2).left_out, Contains(Key(".generator.delayed")));
  EXPECT_THAT(checkpoint::reshard(folder_ / "a", folder_ / "one", 1).left_out, IsEmpty());
  const auto drawn = draw();
  run.load(folder_ / "a");
  EXPECT_TRUE(at::equal(draw(), drawn));
  const auto next = draw();
  run.load(folder_ / "one");
  draw();
  run.load(folder_ / "without");
  on_host.load(folder_ / "a");
  EXPECT_TRUE(at::equal(draw(), next)) << "a checkpoint without the generator, or a host without the device, leaves it alone";
}

}  // namespace
}  // namespace tessera::testing::device_checkpoint_test
