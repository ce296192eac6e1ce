// Wrong arguments are refused at the call as on the CPU, even those that libtorch leaves to a device's kernels. Valid but unusual arguments
// have the same results as on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

struct Refused {
  const char* name;
  void (*call)(at::TensorOptions where);
};

at::Tensor table(at::TensorOptions where) {
  return torch::ones({2, 3}, where);
}
at::Tensor doubles(at::IntArrayRef sizes, at::TensorOptions where) {
  return torch::ones(sizes, where.dtype(torch::kDouble));
}

const Refused kRefused[] = {
    {"arange by nothing", [](auto where) { torch::arange(0, 5, 0, where.dtype(torch::kLong)); }},
    {"arange the wrong way", [](auto where) { torch::arange(0, 5, -1, where); }},
    {"arange without end", [](auto where) { torch::arange(0, std::numeric_limits<double>::infinity(), 1, where); }},
    {"range by nothing", [](auto where) { torch::range(0, 5, 0, where); }},
    {"range the wrong way", [](auto where) { torch::range(0, 5, -1, where); }},
    {"linspace", [](auto where) { torch::linspace(0, 1, -1, where); }},
    {"logspace", [](auto where) { torch::logspace(0, 1, -1, 10, where); }},
    {"eye", [](auto where) { torch::eye(2, -1, where); }},
    {"tril_indices", [](auto where) { torch::tril_indices(-1, 2, 0, where.dtype(torch::kLong)); }},
    {"roll by too many", [](auto where) { table(where).roll({1, 2}, {0}); }},
    {"roll by nothing", [](auto where) { table(where).roll(at::IntArrayRef{}, at::IntArrayRef{}); }},
    {"roll", [](auto where) { table(where).roll(1, 7); }},
    {"flip", [](auto where) { table(where).flip(7); }},
    {"flip twice", [](auto where) { table(where).flip({0, 0}); }},
    {"flip a number", [](auto where) { torch::ones({}, where).flip(1); }},
    {"channel_shuffle into 3", [](auto where) { at::channel_shuffle(torch::ones({1, 4, 2}, where), 3); }},
    {"channel_shuffle into 0", [](auto where) { at::channel_shuffle(torch::ones({1, 4, 2}, where), 0); }},
    {"channel_shuffle a matrix", [](auto where) { at::channel_shuffle(torch::ones({4, 2}, where), 2); }},
    {"index_select", [](auto where) { table(where).index_select(7, torch::zeros({1}, where.dtype(torch::kLong))); }},
    {"kthvalue beyond the last", [](auto where) { table(where).kthvalue(4); }},
    {"kthvalue before the first", [](auto where) { table(where).kthvalue(0); }},
    {"topk", [](auto where) { table(where).topk(4); }},
    {"sort", [](auto where) { table(where).sort(5); }},
    {"median", [](auto where) { table(where).median(5); }},
    {"median of nothing", [](auto where) { torch::ones({2, 0}, where).median(1); }},
    {"max of nothing", [](auto where) { torch::ones({0}, where).max(); }},
    {"min of nothing", [](auto where) { torch::ones({0}, where).min(); }},
    {"searchsorted", [](auto where) { torch::searchsorted(table(where), torch::ones({3, 2}, where)); }},
    {"bucketize", [](auto where) { torch::bucketize(table(where), table(where)); }},
    {"cumsum", [](auto where) { table(where).cumsum(5); }},
    {"cummax", [](auto where) { table(where).cummax(5); }},
    {"logcumsumexp", [](auto where) { table(where).logcumsumexp(5); }},
    {"softmax", [](auto where) { table(where).softmax(5); }},
    {"sum", [](auto where) { table(where).sum(at::IntArrayRef({0, 0})); }},
    {"sum of a number", [](auto where) { torch::ones({}, where).sum(1); }},
    {"nansum", [](auto where) { table(where).nansum(5); }},
    {"var", [](auto where) { table(where).var(at::IntArrayRef{0, 0}); }},
    {"count_nonzero", [](auto where) { table(where).count_nonzero(at::IntArrayRef{5}); }},
    {"argmax", [](auto where) { table(where).argmax(5); }},
    {"trace", [](auto where) { torch::ones({2, 3, 4}, where).trace(); }},
    {"renorm", [](auto where) { table(where).renorm(2, 7, 1); }},
    {"linalg_cross", [](auto where) { at::linalg_cross(table(where), table(where), 7); }},
    {"mm of two types", [](auto where) { table(where).mm(doubles({3, 2}, where)); }},
    {"bmm of two types", [](auto where) { torch::ones({1, 2, 3}, where).bmm(doubles({1, 3, 2}, where)); }},
    {"addmm of two types", [](auto where) { torch::ones({2}, where).addmm(table(where), doubles({3, 2}, where)); }},
    {"addmm to another type", [](auto where) { doubles({2}, where).addmm(table(where), torch::ones({3, 2}, where)); }},
    {"addmm of other sizes", [](auto where) { torch::ones({5}, where).addmm(table(where), torch::ones({3, 2}, where)); }},
    {"baddbmm of two types", [](auto where) { torch::ones({2}, where).baddbmm(torch::ones({1, 2, 3}, where), doubles({1, 3, 2}, where)); }},
    {"addmv of two types", [](auto where) { torch::ones({2}, where).addmv(table(where), doubles({3}, where)); }},
    {"dot of two types", [](auto where) { torch::ones({3}, where).dot(doubles({3}, where)); }},
    {"dot of two sizes", [](auto where) { torch::ones({3}, where).dot(torch::ones({4}, where)); }},
    {"embedding by fractions", [](auto where) { torch::embedding(table(where), torch::zeros({1}, where)); }},
    {"embedding in a list", [](auto where) { torch::embedding(torch::ones({3}, where), torch::zeros({1}, where.dtype(torch::kLong))); }},
};

class Arguments : public ::testing::TestWithParam<Refused> {};
INSTANTIATE_TEST_SUITE_P(All, Arguments, ::testing::ValuesIn(kRefused), [](const auto& info) {
  std::string name(info.param.name);
  std::ranges::replace(name, ' ', '_');
  return name;
});

TEST_P(Arguments, AreRefusedAsOnTheCpu) {
  EXPECT_ANY_THROW(GetParam().call(at::kCPU));
  EXPECT_ANY_THROW(GetParam().call(device_for_tests()));
}

// Some versions of libtorch divide by zero on the CPU.
TEST(Numbers, ByLessThanOneGoNowhere) {
  const auto where = torch::TensorOptions(device_for_tests()).dtype(torch::kLong);
  EXPECT_ANY_THROW(torch::arange(0, 5, 0.5, where));
}

/// Expects the values and the type that the CPU gives.
void expect_as_on_the_cpu(const std::function<at::Tensor(const at::Tensor&)>& compute, const at::Tensor& given) {
  const auto expected = compute(given), actual = compute(given.to(device_for_tests())).cpu();
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::allclose(actual, expected, 0, 0, true)) << actual << expected;
}

TEST(Numbers, AreWhatTheTypeKeepsOfThem) {
  const auto bytes = torch::tensor({1, 2, 200}, torch::kByte);
  expect_as_on_the_cpu([](const at::Tensor& x) { return x * -1; }, bytes);
  expect_as_on_the_cpu([](const at::Tensor& x) { return x.clone().fill_(-1); }, bytes);
  expect_as_on_the_cpu([](const at::Tensor& x) { return x > -1; }, bytes);
  const auto large = torch::tensor({int64_t{1} << 24}, torch::kLong);
  expect_as_on_the_cpu([](const at::Tensor& x) { return at::isin(x, (1 << 24) + 1); }, large);
  expect_as_on_the_cpu([](const at::Tensor& x) { return at::isin(x, 0.1); }, torch::tensor({0.1F, 0.2F}));
  expect_as_on_the_cpu([](const at::Tensor& x) { return at::isin(3, x); }, torch::tensor({0.1F, 3.0F}));
}

TEST(Numbers, HaveTheSignsOfTheCpu) {
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto x = torch::tensor({-0.0F, 0.0F, -2.0F, 3.0F, kNan, -kNan, kInfinity, -kInfinity}).to(type);
    expect_as_on_the_cpu([](const at::Tensor& x) { return x.signbit(); }, x);
    expect_as_on_the_cpu([](const at::Tensor& x) { return x.sign(); }, x);
    expect_as_on_the_cpu([](const at::Tensor& x) { return at::ones_like(x).copysign(x); }, x);
  }
}

TEST(Numbers, TruthsHaveTheBytesOfTheCpu) {
  expect_as_on_the_cpu([](const at::Tensor& x) { return x.view(at::kByte) + 1; }, torch::tensor({true, false, true}));
}

}  // namespace
}  // namespace tessera::xla
