// Autocast on the device casts as its lists say.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/storage.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::autocast_test {
namespace {

class Autocast {
 public:
  Autocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_dtype(kXla, at::kBFloat16);
    at::autocast::set_autocast_enabled(kXla, true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    at::autocast::set_autocast_enabled(kXla, false);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
};

TEST(Autocast, ComputesProductsInTheNarrowerTypeAndLossesInFloat) {
  const auto device = device_for_tests();
  torch::manual_seed(1);
  torch::nn::Linear layer(6, 4);
  to_device(*layer);
  const auto x = torch::randn({3, 6}).to(device);
  const auto target = torch::tensor({0, 1, 3}).to(device);
  at::Tensor scores, normal, loss;
  {
    const Autocast autocast;
    scores = layer(x);
    normal = torch::layer_norm(scores, {4});
    loss = torch::cross_entropy_loss(scores, target);
  }
  EXPECT_EQ(scores.scalar_type(), at::kBFloat16);
  EXPECT_EQ(normal.scalar_type(), at::kFloat);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  const auto narrow = [](const at::Tensor& tensor) { return tensor.to(at::kBFloat16); };
  EXPECT_TRUE(at::equal(scores.cpu(), torch::linear(narrow(x), narrow(layer->weight), narrow(layer->bias)).cpu()));
  loss.backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(layer(x).scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace tessera::xla::autocast_test
