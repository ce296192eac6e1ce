// Checkpointed segments on an XLA device have the gradients of the CPU, also where operators look at strides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/xla/communicator/communicator.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/transports.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::checkpointing_test {
namespace {

using Segment = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& w)>;

/// The gradients of x, which is transposed, and of w.
std::vector<at::Tensor> gradients(const Segment& segment, c10::Device device, const activation::Options& options) {
  torch::manual_seed(3);
  const auto x = torch::randn({2, 5, 3}).to(device).set_requires_grad(true), w = torch::randn({2, 5, 4}).to(device).set_requires_grad(true);
  activation::checkpoint(options, segment, x.transpose(1, 2), w).sin().sum().backward();
  return {x.grad().cpu(), w.grad().cpu()};
}

void expect_as_on_cpu(const Segment& segment, const activation::Options& options = {}) {
  const auto found = gradients(segment, device_for_tests(), options), expected = gradients(segment, at::kCPU, options);
  for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-5)) << i;
}

TEST(CheckpointedSegment, KeepsTheStridesOfInputsOfKeptOperators) {
  const Segment product = [](const at::Tensor& x, const at::Tensor& w) { return x.bmm(w).tanh(); };
  expect_as_on_cpu(product);
  expect_as_on_cpu(product, {.keep = activation::operators({"aten::bmm"})});
}

TEST(CheckpointedSegment, KeepsTheStridesOfInputsThatItTakesApart) {
  expect_as_on_cpu([](const at::Tensor& x, const at::Tensor& w) { return x.as_strided({2, 3, 5}, {15, 1, 3}).exp().bmm(w); });
}

/// Returns the error of a backward pass that runs the segment again.
std::string refusal_of(const Segment& segment) {
  const auto x = torch::ones({2, 3}).to(device_for_tests()).set_requires_grad(true);
  const auto loss = activation::checkpoint(activation::Options{}, segment, x, x).sum();
  return testing::message_of<UsageError>([&] { loss.backward(); });
}

TEST(CheckpointedSegment, RefusesTensorsThatItAssigns) {
  for (const bool by_set_data : {false, true}) {
    auto mean = torch::zeros({3}).to(device_for_tests());
    const Segment centred = [&](const at::Tensor& x, const at::Tensor&) {
      const auto next = 0.9 * mean + 0.1 * x.detach().mean(0);
      by_set_data ? mean.set_data(next) : void(mean = next);
      return (x - mean).sin();
    };
    EXPECT_THAT(refusal_of(centred), ::testing::HasSubstr("the program has assigned that tensor")) << by_set_data;
  }
}

TEST(CheckpointedSegment, DrawsTheSameAgainWithoutEndingTheStep) {
  const auto device = device_for_tests();
  const auto trained = [&](bool again) {
    torch::manual_seed(5);
    const auto x = torch::ones({64, 3}).to(device).set_requires_grad(true);
    const Segment dropped = [](const at::Tensor& input, const at::Tensor&) { return torch::dropout(input.exp(), 0.5, true).sin(); };
    auto y = x * 2;
    for (int i = 0; i < 3; i++) y = again ? activation::checkpoint(activation::Options{}, dropped, y, y) : dropped(y, y);
    (torch::rand({64, 3}, torch::TensorOptions(device)) * y).sum().backward();
    return x.grad();
  };
  const auto expected = trained(false).cpu();
  const auto before = metrics();
  const auto gradient = trained(true);
  EXPECT_EQ(metrics().executions, before.executions);
  EXPECT_TRUE(at::allclose(gradient.cpu(), expected, 1e-5, 1e-6));
}

/// Checkpoints a module that is a unit: unsharding replaces operands of the segment's operators by tensors behind a barrier.
class SegmentOfAUnit : public ::testing::Test {
 protected:
  struct Scaled : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", torch::full({3}, 2.0F));
    at::Tensor beside = torch::full({3}, 3.0F);
    std::function<void(at::Tensor& beside)> change;
    at::Tensor forward(const at::Tensor& x) {
      const auto product = weight * beside;
      if (change) change(beside);
      return (x * product).sin();
    }
  };

  /// The gradient of x.
  at::Tensor gradient(const std::function<void(at::Tensor& beside)>& change, bool again, const std::function<void(Scaled&)>& between = {}) {
    const auto device = device_for_tests();
    const auto model = std::make_shared<Scaled>();
    to_device(*model);
    model->beside = model->beside.to(device);
    model->change = change;
    fully_shard(*model, {.mesh = replica_world()});
    const auto x = torch::ones({2, 3}).to(device).set_requires_grad(true);
    const auto loss = again ? activation::checkpoint(model, x).sum() : model->forward(x).sum();
    if (between) between(*model);
    loss.backward();
    return x.grad().cpu();
  }
};

TEST_F(SegmentOfAUnit, ReadsWhatForwardHasRead) {
  const auto grow = [](at::Tensor& beside) { beside.mul_(2); };
  EXPECT_TRUE(at::allclose(gradient(grow, true), gradient(grow, false)));
}

TEST_F(SegmentOfAUnit, NoticesWhatIsAssignedOrChanged) {
  const auto refusal = [&](const auto& change, const auto& between) {
    return testing::message_of<UsageError>([&] { gradient(change, true, between); });
  };
  const std::function<void(Scaled&)> nothing;
  EXPECT_THAT(refusal([](at::Tensor& beside) { beside = beside * 2; }, nothing), ::testing::HasSubstr("the program has assigned that tensor"));
  EXPECT_THAT(refusal(nullptr, [](Scaled& model) { model.beside.mul_(2); }), ::testing::HasSubstr("was changed in place between forward and backward"));
}

TEST(CheckpointedSegment, LeavesActivationsOnTheDevice) {
  const auto x = torch::ones({2, 3}).to(device_for_tests()).set_requires_grad(true);
  for (const auto to : {OffloadTo::Host, OffloadTo::Disk}) {
    const auto run = [&] { activation::checkpoint(activation::Options{.offload = to}, [](const at::Tensor& t) { return t.sin(); }, x * 1); };
    EXPECT_THAT(testing::message_of<UsageError>(run), ::testing::HasSubstr("leave activation::Options::offload unset"));
  }
}

}  // namespace
}  // namespace tessera::xla::checkpointing_test
