// A number that changes in each step is an argument of the step's program from its second value on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/program_runner.h"
#include "tessera/xla/graph/ops.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/warnings.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::moving_numbers_test {
namespace {

using ::testing::IsEmpty;

/// Runs steps 1 to 6, expects the values of the CPU, and returns how many programs they needed.
int64_t programs_for(const std::function<at::Tensor(at::Tensor& state, int64_t step)>& act, at::ScalarType type = at::kFloat) {
  const auto start = (torch::arange(48) % 7).to(type).view({6, 8});
  auto here = start.clone(), there = start.to(device_for_tests());
  step_boundary();
  const testing::Warnings warnings;
  const auto before = metrics().programs.size();
  std::vector<at::Tensor> expected, found;
  for (int64_t step = 1; step <= 6; step++) {
    expected.push_back(act(here, step).clone());
    found.push_back(act(there, step).clone());
    step_boundary();
  }
  const auto programs = metrics().programs.size() - before;
  for (size_t i = 0; i < found.size(); i++)
    EXPECT_TRUE(at::allclose(found[i].cpu(), expected[i], 1e-5, 1e-6)) << found[i].cpu() << expected[i];
  EXPECT_THAT(warnings.texts, IsEmpty());
  return static_cast<int64_t>(programs);
}

TEST(MovingNumbers, AFloatTensorAndAWholeNumberNeedOneProgram) {
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x / step; }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x * step + step; }), 1);
  // With a result of another shape, because steps are told apart by shapes.
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return (x - step).remainder(step).sum(1); }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.sum() / torch::tensor(step); }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.mul(torch::tensor(step)); }, at::kBFloat16), 1);
}

TEST(MovingNumbers, OfWholeNumbersNeedTwo) {
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x * step - step; }, at::kLong), 2);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.eq(step).to(at::kInt) * (step - 3); }, at::kByte), 2);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return torch::arange(8, x.options()) + step; }, at::kLong), 2);
}

TEST(MovingNumbers, OfSlicesNeedTwo) {
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.narrow(1, step, 2) * 2; }), 2);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x[step - 1].narrow(0, 0, 6) + x.select(1, step); }), 2);
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.t().narrow(0, step, 2).narrow(1, step - 1, 1).exp(); }), 2);
}

TEST(MovingNumbers, OfPlacesInACacheNeedTwoBesideThatOfTheFirstStep) {
  const auto attend = [](at::Tensor& cache, int64_t position) {
    const auto row = cache.narrow(1, position - 1, 1) * 0.5 + 1;
    cache.narrow(1, position, 1).copy_(row);
    const auto mask = torch::arange(8, cache.options().dtype(at::kLong)) <= position;
    return cache.masked_fill(mask.logical_not(), -1e9).softmax(1);
  };
  EXPECT_EQ(programs_for(attend), 3);
}

TEST(MovingNumbers, OfNormsAndAttentionNeedTwo) {
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return at::layer_norm(x, {8}, {}, {}, 0.1 * static_cast<double>(step)); }), 2);
  const auto attention = [](at::Tensor& x, int64_t step) {
    const auto q = x.view({1, 2, 3, 8});
    return at::scaled_dot_product_attention(q, q, q, {}, 0, false, 0.1 * static_cast<double>(step));
  };
  EXPECT_EQ(programs_for(attention), 2);
}

TEST(MovingNumbers, TheProgramBeforeIsDropped) {
  const auto dropped = metrics().dropped;
  EXPECT_EQ(programs_for([](at::Tensor& x, int64_t step) { return x.narrow(1, step, 2).cos(); }), 2);
  EXPECT_EQ(metrics().dropped, dropped + 1);
}

TEST(MovingNumbers, ProgramsThatNobodyRunsAreDropped) {
  (void)device_for_tests();
  ProgramRunner three(std::nullopt, 1, 3);
  const auto compiled_for = [&](int64_t size) {
    const auto before = three.metrics().programs.size();
    (void)three.compute(hlo::iota({at::kFloat, {size}}, 0));
    return three.metrics().programs.size() > before;
  };
  for (int64_t size = 1; size <= 3; size++) EXPECT_TRUE(compiled_for(size));
  EXPECT_FALSE(compiled_for(1));
  EXPECT_TRUE(compiled_for(4));
  EXPECT_EQ(three.metrics().dropped, 1);
  EXPECT_FALSE(compiled_for(1));
  EXPECT_TRUE(compiled_for(2));
}

}  // namespace
}  // namespace tessera::xla::moving_numbers_test
