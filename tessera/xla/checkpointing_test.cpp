// Checkpointed segments on an XLA device have the gradients of the CPU, also where operators look at strides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/testing/transports.h"
#include "tessera/testing/xla_device.h"

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

/// Of a segment that runs again.
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
    EXPECT_THAT(refusal_of(centred), ::testing::HasSubstr("the program has assigned it")) << by_set_data;
  }
}

TEST(CheckpointedSegment, LeavesActivationsOnTheDevice) {
  const auto x = torch::ones({2, 3}).to(device_for_tests()).set_requires_grad(true);
  for (const auto to : {OffloadTo::Host, OffloadTo::Disk}) {
    const auto run = [&] { activation::checkpoint(activation::Options{.offload = to}, [](const at::Tensor& t) { return t.sin(); }, x * 1); };
    EXPECT_THAT(testing::message_of<UsageError>(run), ::testing::HasSubstr("leave activation::Options::offload out"));
  }
}

}  // namespace
}  // namespace tessera::xla::checkpointing_test
