#include "tessera/comm/host/add_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/testing/bits.h"

namespace tessera::add_rows_test {
namespace {

bool add_rows(std::span<const at::Tensor> rows, const at::Tensor& result, float divisor, double* squares = nullptr) {
  std::vector<std::span<const std::byte>> bytes;
  for (const auto& row : rows) bytes.emplace_back(static_cast<const std::byte*>(row.const_data_ptr()), row.nbytes());
  return tessera::add_rows(bytes, rows.front().scalar_type(), result, divisor, squares);
}

class AddRows : public ::testing::TestWithParam<std::tuple<at::ScalarType, int>> {
 protected:
  static std::vector<at::Tensor> rows(int64_t length) {
    const auto [dtype, ranks] = GetParam();
    std::vector<at::Tensor> result;
    for (int rank = 0; rank < ranks; rank++) {
      result.push_back(at::sin(at::arange(length, at::kFloat) * (rank + 1)).to(dtype));
    }
    return result;
  }
};

TEST_P(AddRows, GivesTheMeanAndItsSquares) {
  for (const int64_t length : {0, 1, 31, 33, 4095, 4097, 300'001}) {
    const auto all = rows(length);
    auto expected = all.front().to(at::kFloat);
    for (size_t i = 1; i < all.size(); i++) expected = expected + all[i];
    expected = expected / static_cast<float>(all.size());
    const auto result = at::empty({length}, at::kFloat);
    double squares = 3;  // to which they are added
    ASSERT_TRUE(add_rows(all, result, static_cast<float>(all.size()), &squares));
    EXPECT_TRUE(at::equal(result, expected)) << length;
    const auto reference = expected.to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(squares - 3, reference, 1e-12 * reference) << length;
    // Without squares, and in the place of a row, the sum is the same.
    const auto place = all.front().scalar_type() == at::kFloat ? all.front() : at::empty_like(result);
    ASSERT_TRUE(add_rows(all, place, static_cast<float>(all.size())));
    EXPECT_TRUE(at::equal(place, expected)) << length;
  }
}

TEST_P(AddRows, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto before = at::get_num_threads();
  std::vector<double> squares;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const auto all = rows(1'000'003);
    ASSERT_TRUE(add_rows(all, at::empty({1'000'003}, at::kFloat), 1, &squares.emplace_back(0)));
  }
  at::set_num_threads(before);
  EXPECT_EQ(squares[0], squares[1]);
  EXPECT_EQ(squares[0], squares[2]);
}

TEST_P(AddRows, LeavesOtherNumbersAlone) {
  const auto doubles = at::ones({4}, at::kDouble);
  const auto result = at::zeros({4}, at::kFloat);
  double squares = 1;
  EXPECT_FALSE(add_rows(std::span(&doubles, 1), result, 1, &squares));
  EXPECT_EQ(result.sum().item<float>(), 0);
  EXPECT_EQ(squares, 1);
}

// The constants were computed on x86-64.
TEST(AddRowsKernel, GivesTheSameBitsOnEveryProcessor) {
  constexpr size_t kCount = 10'007;
  const auto bits_of = [&](const auto& row, size_t ranks, at::ScalarType dtype) {
    std::vector<std::span<const std::byte>> rows;
    for (size_t rank = 0; rank < ranks; rank++) rows.push_back(std::as_bytes(std::span(row).subspan(rank, kCount)));
    std::vector<float> sums(kCount);
    std::vector<double> squares(1);
    const auto result = at::from_blob(sums.data(), {static_cast<int64_t>(kCount)}, at::kFloat);
    EXPECT_TRUE(tessera::add_rows(rows, dtype, result, static_cast<float>(ranks), squares.data()));
    return testing::BitHash().add(sums).add(squares).value();
  };
  const auto floats = testing::fixed_floats(kCount + 3, 1);
  const auto bfloats = testing::fixed_bfloats(kCount + 3, 1);
  EXPECT_EQ(bits_of(floats, 2, at::kFloat), 0x7a97c4b0a54743f7ULL);
  EXPECT_EQ(bits_of(floats, 3, at::kFloat), 0x8259da7d506127e0ULL);
  EXPECT_EQ(bits_of(bfloats, 3, at::kBFloat16), 0x9e8f5c8ebe64416aULL);
}

INSTANTIATE_TEST_SUITE_P(, AddRows, ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16), ::testing::Values(1, 2, 3, 7)));

}  // namespace
}  // namespace tessera::add_rows_test
