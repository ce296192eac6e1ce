// Numbers at the edges of operators' ranges have the same results on the device as on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::numbers_test {
namespace {

using tessera::testing::message_of;
using ::testing::HasSubstr;

constexpr auto kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor there(const at::Tensor& tensor) {
  return tensor.to(device_for_tests());
}

void expect_as_on_the_cpu(const std::function<at::Tensor(const at::Tensor&)>& compute, const at::Tensor& given, double within = 0) {
  const auto expected = compute(given), actual = compute(there(given)).cpu();
  EXPECT_TRUE(at::allclose(actual, expected, within, 0, /*equal_nan=*/true)) << actual << expected;
}

TEST(Edges, BetweenTwoAreEachOfThemAtTheEnds) {
  const auto from = torch::tensor({1e8F, -3.0F, 0.1F, -kInfinity}), to = torch::tensor({1.0F, 1e8F, 0.3F, 2.0F});
  for (const double weight : {0.0, 0.25, 0.5, 0.75, 1.0, 1.5, -0.5}) {
    EXPECT_TRUE(at::allclose(there(from).lerp(there(to), weight).cpu(), from.lerp(to, weight), 1e-6, 0, true)) << weight;
    const auto weights = torch::full({4}, weight);
    EXPECT_TRUE(at::allclose(there(from).lerp(there(to), there(weights)).cpu(), from.lerp(to, weights), 1e-6, 0, true)) << weight;
  }
  expect_as_on_the_cpu([](const at::Tensor& x) { return x.quantile(0.999); }, torch::tensor({1.0F, 2.0F, 1e8F}), 1e-6);
  expect_as_on_the_cpu([](const at::Tensor& x) { return x.quantile(1.0); }, torch::tensor({-kInfinity, 2.0F, 5.0F}));
}

TEST(Edges, FarBelowZeroHaveTheirDigitsInGelu) {
  const auto x = torch::linspace(-9, 3, 97, torch::kDouble), exact = at::gelu(x);
  const auto found = at::gelu(there(x.to(torch::kFloat))).cpu().to(torch::kDouble);
  EXPECT_TRUE(at::allclose(found, x * 0.5 * torch::erfc(-x * M_SQRT1_2), 1e-5, 1e-30)) << (found / exact);
  auto leaf = there(x.to(torch::kFloat)).requires_grad_(), wide = x.clone().requires_grad_();
  at::gelu(leaf).sum().backward();
  at::gelu(wide).sum().backward();
  EXPECT_TRUE(at::allclose(leaf.grad().cpu().to(torch::kDouble), wide.grad(), 1e-4, 1e-9));
}

TEST(Edges, BesideNanAreThoseOfTheCpu) {
  const auto x = torch::tensor({1.0F, kInfinity, -kInfinity, kNan, kNan, 3.0F}),
             y = torch::tensor({kNan, kNan, kNan, kInfinity, -2.0F, 4.0F});
  EXPECT_TRUE(at::allclose(at::hypot(there(x), there(y)).cpu(), at::hypot(x, y), 1e-6, 0, true));
  const auto slope = [](const std::function<at::Tensor(const at::Tensor&)>& of) {
    return [of](const at::Tensor& x) {
      auto leaf = x.clone().requires_grad_();
      of(leaf).sum().backward();
      return leaf.grad();
    };
  };
  const auto given = torch::tensor({kNan, -1.0F, 0.0F, 3.0F, 6.0F, 7.0F});
  expect_as_on_the_cpu(slope([](const at::Tensor& x) { return at::relu6(x); }), given);
  expect_as_on_the_cpu(slope([](const at::Tensor& x) { return at::elu(x); }), given, 1e-6);
  expect_as_on_the_cpu(slope([](const at::Tensor& x) { return at::hardsigmoid(x); }), given, 1e-6);
  const auto image = torch::tensor({1.0F, kNan, 2.0F, kNan, 5.0F, 5.0F, 3.0F, kNan, 4.0F}).view({1, 1, 3, 3});
  expect_as_on_the_cpu([](const at::Tensor& x) { return std::get<1>(at::max_pool2d_with_indices(x, 2, 1)); }, image);
  expect_as_on_the_cpu([](const at::Tensor& x) { return std::get<1>(at::max_pool2d_with_indices(x, 3)); }, image);
  expect_as_on_the_cpu([](const at::Tensor& x) { return std::get<1>(at::max_pool2d_with_indices(x, 3)); }, image.nan_to_num(0));
}

/// bfloat16 has no 257, and float16 no 2049: if the product is rounded before the bias is added, the sum is not 1.
TEST(Edges, OfHalfTypesAreRoundedOnceWithTheBias) {
  for (const auto& [type, count] : {std::pair{at::kBFloat16, 257}, {at::kHalf, 2049}}) {
    const auto where = torch::TensorOptions(device_for_tests()).dtype(type);
    const auto row = torch::ones({1, count}, where), bias = torch::full({1}, 1 - count, where);
    const auto expect_one = [](const at::Tensor& x) { EXPECT_EQ(x.cpu().to(at::kFloat).reshape({-1})[0].item<float>(), 1); };
    expect_one(torch::linear(row, row, bias));
    expect_one(bias.addmv(row, row[0]));
    expect_one(bias.baddbmm(row.unsqueeze(0), row.t().unsqueeze(0)));
    EXPECT_EQ(torch::linear(row, row, bias).scalar_type(), type);
    if (type == at::kHalf) continue;
    const auto image = row.view({1, count, 1, 1});
    expect_one(torch::conv2d(image, image, bias));
    expect_one(torch::conv_transpose2d(image, image.view({count, 1, 1, 1}), bias));
  }
}

TEST(Edges, BehindAShorterTensorAreStillThereWhenItGrows) {
  const auto shortened = [](const at::Tensor& x) {
    auto own = x.clone();
    own.resize_({2});
    own.mul_(2);
    own.resize_({3, 2});
    return own;
  };
  expect_as_on_the_cpu(shortened, torch::arange(6, torch::kFloat));
  const auto longer = [](const at::Tensor& x) { return x.clone().resize_({9}).narrow(0, 0, 6); };
  expect_as_on_the_cpu(longer, torch::arange(6, torch::kFloat));
}

TEST(Edges, FillATensorThatIsExpanded) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kLong}) {
    const auto filled = [](const std::function<void(at::Tensor&)>& fill) {
      return [fill](const at::Tensor& x) {
        const auto own = x.clone();
        auto wide = own.narrow(1, 1, 1).expand({3, 4});
        fill(wide);
        return own;
      };
    };
    const auto given = torch::arange(6, type).view({3, 2});
    expect_as_on_the_cpu(filled([](at::Tensor& x) { x.fill_(7); }), given);
    expect_as_on_the_cpu(filled([](at::Tensor& x) { x.zero_(); }), given);
  }
  auto wide = there(torch::ones({3, 1})).expand({3, 4});
  EXPECT_ANY_THROW(wide.add_(1));
}

TEST(Edges, AreWrittenIntoWindowsThatOverlapOnlyIfAllAreOne) {
  const auto numbers = [](const at::Tensor& x) {
    const auto own = x.clone();
    own.unfold(0, 3, 2).fill_(5);
    return own;
  };
  expect_as_on_the_cpu(numbers, torch::arange(8, torch::kFloat));
  const auto apart = [](const at::Tensor& x) {
    const auto own = x.clone();
    own.as_strided({3, 2}, {2, 3}).mul_(2);  // the windows overlap, but share no element
    return own;
  };
  expect_as_on_the_cpu(apart, torch::arange(9, torch::kFloat));
  const auto own = there(torch::arange(8, torch::kFloat));
  EXPECT_THAT(message_of<UsageError>([&] { own.unfold(0, 3, 1).sub_(1); }),
              HasSubstr("sizes [6, 3] and strides [1, 1] can't be written, because its windows overlap"));
  EXPECT_TRUE(at::equal(own.cpu(), torch::arange(8, torch::kFloat)));
}

}  // namespace
}  // namespace tessera::xla::numbers_test
