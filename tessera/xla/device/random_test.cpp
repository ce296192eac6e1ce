// The random numbers of the device: its generator is one of libtorch's.
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/values.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

at::Device two_replicas() {
  static const auto device = make_device({.devices = 2});
  return device;
}

std::vector<at::Tensor> drawn_on_device() { return replicas(torch::rand({8}, torch::TensorOptions(two_replicas()))); }

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t r = 0; r < 2; r++) EXPECT_TRUE(at::equal(a[r], b[r])) << r;
}

TEST(Random, ASeedBringsTheSameNumbers) {
  two_replicas();
  torch::manual_seed(5);
  const auto first = drawn_on_device(), second = drawn_on_device();
  EXPECT_FALSE(at::equal(first[0], second[0]));
  EXPECT_FALSE(at::equal(first[0], first[1]));
  torch::manual_seed(5);
  expect_equal(drawn_on_device(), first);
}

TEST(Random, AStateIsSavedAndRestored) {
  auto generator = at::globalContext().defaultGenerator(two_replicas());
  torch::manual_seed(7);
  drawn_on_device();
  const auto state = generator.get_state();
  EXPECT_TRUE(state.is_cpu());
  const auto expected = drawn_on_device();
  torch::manual_seed(8);
  generator.set_state(state);
  expect_equal(drawn_on_device(), expected);
  EXPECT_EQ(generator.current_seed(), 7U);
  auto other = generator.clone();
  const auto next = drawn_on_device();
  EXPECT_TRUE(at::equal(replicas(torch::rand({8}, other, torch::TensorOptions(two_replicas())))[1], next[1]));
  EXPECT_ANY_THROW(generator.set_state(torch::zeros({16}, torch::kByte)));
}

}  // namespace
}  // namespace tessera::xla
