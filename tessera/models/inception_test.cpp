// Inception v3 with weights that expect images less 0.5 and divided by 0.5.
#include "tessera/models/inception.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::testing::inception_test {
namespace {

TEST(Inception, TransformsImagesOfOtherNetworks) {
  const torch::NoGradGuard no_grad;
  models::Inception plain(models::InceptionOptions{.classes = 4});
  models::Inception transforming(models::InceptionOptions{.classes = 4, .transform_input = true});
  const auto from = plain->parameters(), to = transforming->parameters();
  for (size_t i = 0; i < from.size(); i++) to[i].copy_(from[i]);
  plain->eval();
  transforming->eval();
  const auto pixels = at::rand({2, 3, 75, 75});
  const auto of_channels = [](at::ArrayRef<float> values) { return at::tensor(values).view({1, 3, 1, 1}); };
  const auto expected = plain->forward((pixels - 0.5) / 0.5);
  const auto scores = transforming->forward((pixels - of_channels({0.485, 0.456, 0.406})) / of_channels({0.229, 0.224, 0.225}));
  ASSERT_EQ(scores.sizes(), at::IntArrayRef({2, 4}));
  EXPECT_TRUE(at::allclose(scores, expected, 1e-3, 1e-3 * expected.abs().max().item<double>())) << scores << expected;
}

}  // namespace
}  // namespace tessera::testing::inception_test
