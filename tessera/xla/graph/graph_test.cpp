// Graphs, printed and run on each CPU plugin, against libtorch.
#include "tessera/xla/graph/arithmetic.h"
#include "tessera/xla/graph/scan.h"
#include "tessera/xla/graph/step_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

class Graph : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { torch::manual_seed(1); }

  Value given(const at::Tensor& tensor) {
    return leaf(std::make_shared<Data>(Data{client_.upload(tensor, 0)}), {tensor.scalar_type(), tensor.sizes().vec()});
  }
  at::Tensor computed(const Value& value) { return computed(std::vector{value})[0]; }
  std::vector<at::Tensor> computed(const std::vector<Value>& values) {
    std::vector<Wanted> wanted;
    for (const auto& value : values) wanted.push_back({value});
    const StepProgram step(std::move(wanted));
    const auto results = client_.compile(step.program()).run(step.arguments(client_, 1));
    std::vector<at::Tensor> tensors;
    for (const auto& buffer : results[0]) tensors.push_back(buffer.download());
    return tensors;
  }

  pjrt::Client client_{pjrt::Plugin::load(GetParam())};
};

std::vector<std::string> cpu_plugins() {
  std::vector<std::string> files;
  for (const auto& plugin : pjrt::installed_plugins()) {
    if (plugin.name == "cpu") files.push_back(plugin.file.string());
  }
  return files;
}
INSTANTIATE_TEST_SUITE_P(Cpu, Graph, ::testing::ValuesIn(cpu_plugins()),
                         [](const auto& info) { return std::filesystem::path(info.param).stem().string(); });

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-5, true)) << actual << expected;
}

TEST_P(Graph, ShapesAndElements) {
  const auto a = torch::randn({3, 4}), b = torch::randn({4});
  const auto x = given(a), y = given(b);
  const auto results = computed({
      hlo::binary("add", x, hlo::expand(y, {3, 4})),
      hlo::transpose(x, {1, 0}),
      hlo::slice(x, 1, 1, 4, 2),
      hlo::pad(x, hlo::constant(2.0, at::kFloat), {1, 0}, {0, 2}, {1, 0}),
      hlo::reverse(x, {1}),
      hlo::concatenate(std::vector{x, hlo::expand(y, {1, 4})}, 0),
      hlo::select(hlo::compare("GT", x, hlo::fixed(x, 0)), x, hlo::full(-0.5, x.type())),
      hlo::convert(hlo::convert(x, at::kBool), at::kInt),
      hlo::convert(x, at::kBFloat16),
  });
  expect_close(results[0], a + b);
  expect_close(results[1], a.t());
  expect_close(results[2], a.slice(1, 1, 4, 2));
  EXPECT_EQ(results[3].sizes(), (std::vector<int64_t>{6, 6}));
  expect_close(results[4], a.flip(1));
  expect_close(results[5], torch::cat({a, b.unsqueeze(0)}));
  expect_close(results[6], torch::where(a > 0, a, -0.5));
  expect_close(results[7], torch::ones({3, 4}, torch::kInt));
  EXPECT_TRUE(at::equal(results[8], a.to(torch::kBFloat16)));
}

TEST_P(Graph, SumsProductsAndWindows) {
  const auto a = torch::randn({2, 3, 8, 8}), w = torch::randn({4, 3, 3, 3}), m = torch::randn({5, 6}), n = torch::randn({6, 7});
  const auto x = given(a);
  const auto low = hlo::lowest(at::kFloat);
  const auto [sorted, places] = hlo::sort(given(m), 1, hlo::Order::Descending);
  const auto results = computed({
      hlo::sum(x, {0, 2}),
      hlo::maximum(x, {3}),
      hlo::dot(given(m), given(n), {{}, {}, {1}, {0}}),
      hlo::convolution(x, given(w), {at::kFloat, {2, 4, 4, 4}}, "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]", {.size = {}, .stride = {2, 2}, .padding_low = {1, 1}, .padding_high = {1, 1}, .base_dilation = {}, .dilation = {}}),
      hlo::reduce_window(x, Combine::Max, low, {.size = {1, 1, 2, 2}, .stride = {1, 1, 2, 2}, .padding_low = {}, .padding_high = {}, .base_dilation = {}, .dilation = {}}),
      sorted,
      places,
      hlo::take(given(m), given(torch::tensor({{1, 2}, {0, 5}})), 1),
      hlo::put(given(torch::zeros({4, 2})), given(torch::tensor({1, 1, 3})), given(torch::ones({3, 2})), Combine::Add),
  });
  expect_close(results[0], a.sum(at::IntArrayRef({0, 2})));
  expect_close(results[1], a.amax(3));
  expect_close(results[2], m.mm(n));
  expect_close(results[3], at::conv2d(a, w, {}, 2, 1));
  expect_close(results[4], at::max_pool2d(a, 2));
  const auto [expected, expected_places] = m.sort(1, true);
  expect_close(results[5], expected);
  EXPECT_TRUE(at::equal(results[6], expected_places));
  expect_close(results[7], m.index_select(1, torch::tensor({1, 2, 0, 5})).view({5, 2, 2}));
  expect_close(results[8], torch::tensor({{0.0F, 0.0F}, {2.0F, 2.0F}, {0.0F, 0.0F}, {1.0F, 1.0F}}));
}

TEST_P(Graph, KnownNumbersAreComparedWithTheirSigns) {
  const auto number = [](int64_t value) { return hlo::broadcast(hlo::constant(value, at::kLong), {1}, {}); };
  EXPECT_FALSE(computed(hlo::compare("LE", number(0), number(-1))).item<bool>());
}

TEST_P(Graph, ScansCombineAllThatComesBefore) {
  const auto a = torch::randn({3, 7});
  const auto x = given(a);
  const auto results = computed({
      hlo::running(x, 1, Combine::Add),
      hlo::running(x, 0, Combine::Multiply),
      hlo::shifted(x, 1, -2, hlo::constant(5.0, at::kFloat)),
  });
  expect_close(results[0], a.cumsum(1));
  expect_close(results[1], a.cumprod(0));
  expect_close(results[2], torch::cat({a.slice(1, 2), torch::full({3, 2}, 5.0F)}, 1));
}

TEST_P(Graph, BitsAreReadInOtherTypes) {
  const auto a = torch::randn({4, 6});
  const auto x = given(a), pairs = hlo::bitcast(x, at::kComplexFloat);
  const auto results = computed({
      hlo::bitcast(x, at::kInt),
      hlo::bitcast(x, at::kShort),
      hlo::bitcast(hlo::bitcast(x, at::kDouble), at::kFloat),
      hlo::bitcast(hlo::conjugate(pairs), at::kFloat),
  });
  EXPECT_TRUE(at::equal(results[0], a.view(at::kInt)));
  EXPECT_TRUE(at::equal(results[1], a.view(at::kShort)));
  expect_close(results[2], a);
  expect_close(results[3], torch::view_as_real(torch::view_as_complex(a.view({4, 3, 2})).conj().resolve_conj()).reshape({4, 6}));
}

TEST_P(Graph, TruthsAndSingleNumbersHaveBitsToo) {
  const auto truths = torch::tensor({true, false, true, true}), pair = torch::tensor(torch::ArrayRef<float>{1.5F, 2.5F});
  const auto bits = hlo::bitcast(given(truths), at::kByte), one = given(torch::tensor(1.5));
  const auto results = computed({bits, hlo::bitcast(bits, at::kBool), hlo::bitcast(given(truths), at::kInt), hlo::bitcast(one, at::kShort),
                                 hlo::bitcast(hlo::reshape(hlo::bitcast(given(pair), at::kComplexFloat), {}), at::kLong)});
  EXPECT_TRUE(at::equal(results[0], truths.view(at::kByte)));
  EXPECT_TRUE(at::equal(results[1], truths));
  EXPECT_TRUE(at::equal(results[2], truths.view(at::kInt)));
  EXPECT_TRUE(at::equal(results[3], torch::tensor({1.5F}).view(at::kShort)));
  EXPECT_TRUE(at::equal(results[4], pair.view(at::kLong)[0]));
}

TEST_P(Graph, ConstantsAreWhatTheirTypeKeepsOfThem) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  const auto numbers = [&](const Value& value) { return computed(hlo::convert(value, at::kLong)); };
  EXPECT_EQ(numbers(hlo::constant(int64_t{-1}, at::kByte)).item<int64_t>(), 255);
  EXPECT_EQ(numbers(hlo::constant(300.0, at::kChar)).item<int64_t>(), 44);
  EXPECT_EQ(numbers(hlo::constant(kInfinity, at::kLong)).item<int64_t>(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(numbers(hlo::constant(-kInfinity, at::kLong)).item<int64_t>(), std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(at::equal(numbers(hlo::constants(Sizes{-1, 3, 256}, at::kByte)), torch::tensor({255, 3, 0})));
  EXPECT_TRUE(at::equal(numbers(hlo::constants(Sizes{0, 2}, at::kBool)), torch::tensor({0, 1})));
}

TEST_P(Graph, RandomBitsComeWithTheNextState) {
  const auto state = given(torch::tensor({1, 2}, torch::kLong).view(torch::kUInt64));
  const auto [next, bits] = hlo::random_bits(state, {at::kUInt32, {1000}}, "PHILOX");
  const auto results = computed(std::vector{hlo::bitcast(next, at::kLong), hlo::convert(bits, at::kDouble)});
  EXPECT_FALSE(at::equal(results[0], torch::tensor({1, 2})));
  EXPECT_NEAR(results[1].mean().item<double>() / 4294967296.0, 0.5, 0.05);
}

TEST(StepProgram, HasOneKeyForAllNumbersAndUploads) {
  const auto data = [] { return leaf(std::make_shared<Data>(), {at::kFloat, {4}}); };
  const auto step = [](const Value& a, const Value& b, double rate) {
    return StepProgram({{hlo::binary("subtract", a, hlo::binary("multiply", b, hlo::full(rate, b.type())))}});
  };
  const auto a = data(), b = data(), c = data();
  EXPECT_EQ(step(a, b, 0.1).key(), step(b, a, 0.2).key());
  EXPECT_EQ(step(a, b, 0.1).key(), step(c, a, 0.3).key());
  EXPECT_NE(step(a, b, 0.1).key(), step(a, a, 0.1).key());
  for (const double special : {0.0, 1.0, -1.0, std::numeric_limits<double>::infinity()}) EXPECT_EQ(step(a, b, 0.1).key(), step(a, b, special).key());
  EXPECT_NE(step(a, b, 0.1).key(), StepProgram({{hlo::unary("negate", a)}}).key());
}

TEST(StepProgram, PutsAResultWhereItsDonorWas) {
  const auto old = std::make_shared<Data>();
  const auto a = leaf(old, {at::kFloat, {4}});
  const auto next = hlo::unary("negate", a);
  const auto program = StepProgram({{next, old}}).program();
  EXPECT_TRUE(program.parameters[0].donated);
  EXPECT_THAT(program.text, ::testing::HasSubstr("%a0: tensor<4xf32> {tf.aliasing_output = 0 : i32}"));
  EXPECT_FALSE(StepProgram({{hlo::convert(next, at::kInt), old}}).program().parameters[0].donated);
}

TEST(Node, LongChainsEndWithoutTheStack) {
  auto value = leaf(std::make_shared<Data>(), {at::kFloat, {}});
  for (int i = 0; i < 1000000; i++) value = hlo::unary("negate", value);
  value = {};
}

}  // namespace
}  // namespace tessera::xla
