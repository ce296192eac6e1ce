// Products of bfloat16 and float16 are those of float32, rounded, whichever instructions a processor has.
#include "tessera/base/wide_products.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <tuple>

#include "tessera/base/log.h"
#include "tests/testing/child_task.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::wide_products_test {
namespace {

using Operands = std::vector<at::Tensor>;

struct Product {
  const char* name;
  std::vector<std::vector<int64_t>> sizes;
  std::function<at::Tensor(const Operands&)> compute;
};

std::vector<Product> products() {
  return {
      {"linear", {{5, 6}, {4, 6}, {4}}, [](const Operands& x) { return at::linear(x[0], x[1], x[2]); }},
      {"linear of three dimensions", {{2, 3, 6}, {4, 6}}, [](const Operands& x) { return at::linear(x[0], x[1]); }},
      {"matmul", {{3, 4, 5}, {5, 6}}, [](const Operands& x) { return at::matmul(x[0], x[1]); }},
      {"transposed", {{5, 4}, {6, 5}}, [](const Operands& x) { return x[0].t().mm(x[1].t()); }},
      {"addmm", {{4, 6}, {4, 5}, {5, 6}}, [](const Operands& x) { return at::addmm(x[0], x[1], x[2], 0.5, 2); }},
      {"bmm", {{3, 4, 5}, {3, 5, 6}}, [](const Operands& x) { return at::bmm(x[0], x[1]); }},
      {"baddbmm", {{3, 4, 6}, {3, 4, 5}, {3, 5, 6}}, [](const Operands& x) { return at::baddbmm(x[0], x[1], x[2]); }},
      {"a vector", {{4, 5}, {5}}, [](const Operands& x) { return at::mv(x[0], x[1]); }},
      {"convolution", {{2, 4, 6, 6}, {6, 4, 3, 3}, {6}}, [](const Operands& x) { return at::conv2d(x[0], x[1], x[2]); }},
      {"one of 1 x 1 pixel", {{2, 4, 3, 3}, {6, 4, 1, 1}, {6}}, [](const Operands& x) { return at::conv2d(x[0], x[1], x[2]); }},
      {"one with a stride and dilation",
       {{2, 4, 9, 9}, {6, 4, 3, 3}},
       [](const Operands& x) { return at::conv2d(x[0], x[1], {}, 2, 1, 2); }},
      {"one of each channel", {{2, 4, 6, 6}, {4, 1, 3, 3}}, [](const Operands& x) { return at::conv2d(x[0], x[1], {}, 1, 1, 1, 4); }},
      {"one of one dimension", {{2, 4, 6}, {6, 4, 3}, {6}}, [](const Operands& x) { return at::conv1d(x[0], x[1], x[2]); }},
      {"one of three dimensions", {{2, 4, 4, 4, 4}, {6, 4, 3, 3, 3}}, [](const Operands& x) { return at::conv3d(x[0], x[1]); }},
      {"one of a traced module",
       {{2, 4, 6, 6}, {6, 4, 3, 3}},
       [](const Operands& x) { return at::_convolution(x[0], x[1], {}, 1, 0, 1, false, 0, 1, false, false, true, true); }},
      {"transposed convolution", {{2, 4, 6}, {4, 6, 3}}, [](const Operands& x) { return at::conv_transpose1d(x[0], x[1]); }},
      {"attention",
       {{2, 2, 8, 4}, {2, 2, 8, 4}, {2, 2, 8, 4}},
       [](const Operands& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, /*is_causal=*/true); }},
  };
}

TEST(WideProducts, AreThoseOfFloatRoundedInForwardAndBackward) {
  torch::manual_seed(1);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& product : products()) {
      SCOPED_TRACE(::testing::Message() << product.name << " of " << dtype);
      Operands narrow, wide;
      for (const auto& sizes : product.sizes) {
        narrow.push_back(at::randn(sizes).to(dtype).requires_grad_());
        wide.push_back(narrow.back().detach().to(at::kFloat).requires_grad_());
      }
      const auto result = product.compute(narrow), expected = product.compute(wide);
      EXPECT_EQ(result.scalar_type(), dtype);
      EXPECT_TRUE(at::allclose(result.to(at::kFloat), expected, 0.02, 0.02));
      EXPECT_TRUE(!multiplies_slowly(dtype) || at::equal(result, expected.to(dtype)));
      const auto weights = at::randn(result.sizes()).to(dtype);
      (result * weights).sum().backward();
      (expected * weights.to(at::kFloat)).sum().backward();
      for (size_t i = 0; i < narrow.size(); i++) {
        EXPECT_EQ(narrow[i].grad().scalar_type(), dtype);
        EXPECT_TRUE(at::allclose(narrow[i].grad().to(at::kFloat), wide[i].grad(), 0.05, 0.05)) << i;
      }
    }
  }
}

TEST(WideProducts, OfLargeMatricesAreWideInStrips) {
  torch::manual_seed(1);
  // One weight, or the result, is larger than a strip.
  for (const auto& [rows, in, out] : {std::tuple(3, 1030, 1100), std::tuple(1100, 3, 1030), std::tuple(1030, 1100, 3)}) {
    SCOPED_TRACE(::testing::Message() << rows << " rows of " << in << " to " << out);
    const auto compute = [](const Operands& x) { return at::linear(x[0], x[1], x[2]) + 0.5 * x[0].mm(x[1].t()); };
    Operands narrow, wide;
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{rows, in}, {out, in}, {out}}) {
      narrow.push_back(at::randn(sizes).to(at::kBFloat16).requires_grad_());
      wide.push_back(narrow.back().detach().to(at::kFloat).requires_grad_());
    }
    const auto weights = at::randn({rows, out}).to(at::kBFloat16);
    const auto result = compute(narrow), expected = compute(wide);
    EXPECT_TRUE(at::allclose(result.to(at::kFloat), expected, 0.02, 0.02 * std::sqrt(in)));
    (result * weights).sum().backward();
    (expected * weights.to(at::kFloat)).sum().backward();
    const double terms[] = {static_cast<double>(out), static_cast<double>(rows), static_cast<double>(rows)};
    for (size_t i = 0; i < narrow.size(); i++)
      EXPECT_TRUE(at::allclose(narrow[i].grad().to(at::kFloat), wide[i].grad(), 0.02, 0.04 * std::sqrt(terms[i]))) << i;
    const auto nothing = at::full({out}, NAN, at::kBFloat16);
    EXPECT_TRUE(at::addmm(nothing, narrow[0], narrow[1].t(), 0).isfinite().all().item<bool>());
    const auto sum = at::addmm(narrow[2], narrow[0], narrow[1].t(), 0.5, 2), wide_sum = at::addmm(wide[2], wide[0], wide[1].t(), 0.5, 2);
    EXPECT_TRUE(at::allclose(sum.to(at::kFloat), wide_sum, 0.02, 0.02 * std::sqrt(in)));
  }
}

TEST(WideProducts, AreWrittenWhereTheyBelong) {
  const auto a = at::ones({2, 3}, at::kBFloat16), b = at::ones({3, 4}, at::kBFloat16);
  auto out = at::empty({0}, at::kBFloat16), sum = at::ones({2, 4}, at::kBFloat16);
  auto& written = at::mm_out(out, a, b);
  EXPECT_TRUE(written.is_same(out) && at::equal(out, at::full({2, 4}, 3, at::kBFloat16)));
  EXPECT_TRUE(at::equal(sum.addmm_(a, b, 2), at::full({2, 4}, 5, at::kBFloat16)));
  auto columns = at::zeros({4, 2}, at::kBFloat16);
  auto transposed = columns.t();
  at::mm_out(transposed, a, b);
  EXPECT_TRUE(at::equal(columns, at::full({4, 2}, 3, at::kBFloat16)));
}

/// Returns how many lines the log had about the products.
const ChildTask multiply("multiply in bfloat16", [](const std::string&) {
  int lines = 0;
  set_log_sink([&](const LogRecord& record) {
    lines += static_cast<int>(record.text.find("no instructions for products of BFloat16") != std::string_view::npos);
  });
  const auto x = at::ones({3, 3}, at::kBFloat16);
  for (int i = 0; i < 3; i++) x.mm(x);
  set_log_sink({});
  return lines;
});

TEST(WideProducts, AreInTheLogOnce) {
  EXPECT_EQ(run_program({this_program()}, multiply.environment()).status, multiplies_slowly(at::kBFloat16) ? 1 : 0);
}

TEST(WideProducts, RefuseOperandsOfTwoDtypesAsLibtorchDoes) {
  const auto narrow = at::ones({3, 3}, at::kBFloat16), wide = at::ones({3, 3});
  EXPECT_THROW(at::mm(wide, narrow), c10::Error);
  EXPECT_THROW(at::mm(narrow, wide), c10::Error);
  EXPECT_THROW(at::addmm(wide, narrow, narrow), c10::Error);
  EXPECT_THROW(at::conv2d(at::ones({1, 3, 3, 3}, at::kBFloat16), at::ones({1, 3, 3, 3}, at::kBFloat16), at::ones({1})), c10::Error);
}

}  // namespace
}  // namespace tessera::testing::wide_products_test
