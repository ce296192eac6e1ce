// Slices of a range cover its values in order; the intersection and the difference of two slices together give the first one.
#include "tessera/base/tensor_slice.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::tensor_slice_test {
namespace {

using ::testing::IsEmpty;
using Numbers = std::vector<int64_t>;

TensorSlice slice(Numbers shape, Numbers offsets, Numbers sizes) {
  return {.shape = std::move(shape), .offsets = std::move(offsets), .sizes = std::move(sizes)};
}

/// A tensor with these strides in which each value is its own position in memory.
at::Tensor counted(at::IntArrayRef shape, at::IntArrayRef strides) {
  return at::arange(c10::multiply_integers(shape)).as_strided(shape, strides);
}

/// Checks every range of a tensor.
void expect_ranges(at::IntArrayRef shape, at::IntArrayRef strides) {
  const auto whole = counted(shape, strides);
  for (int64_t begin = 0; begin <= whole.numel(); begin++) {
    for (int64_t end = begin; end <= whole.numel(); end++) {
      const auto slices = slices_of_range(shape, strides, begin, end - begin);
      EXPECT_LE(slices.size(), std::max<size_t>(1, 2 * shape.size() - 1));
      const auto flat = at::full({end - begin}, -1);
      const auto views = views_of_slices(flat, slices, strides);
      for (size_t i = 0; i < slices.size(); i++) {
        EXPECT_TRUE(slices[i].fits());
        views[i].copy_(view_of(whole, slices[i]));
      }
      ASSERT_TRUE(at::equal(flat, at::arange(begin, end))) << "from " << begin << " to " << end;
    }
  }
}

TEST(TensorSlice, RangesAreSlicesInOrder) {
  expect_ranges({}, {});
  expect_ranges({7}, {1});
  expect_ranges({4, 3}, {3, 1});
  expect_ranges({2, 1, 3, 2}, {6, 6, 2, 1});
  expect_ranges({2, 3, 2, 2}, {12, 4, 2, 1});
}

TEST(TensorSlice, RangesFollowTheOrderInMemory) {
  expect_ranges({3, 4}, {1, 3});
  expect_ranges({2, 3, 2, 2}, {12, 1, 6, 3});  // channels last
  expect_ranges({5, 1, 2}, {1, 1, 5});
}

TEST(TensorSlice, RangesHaveAsFewSlicesAsTheyCan) {
  EXPECT_EQ(slices_of_range({4, 3}, 0, 12), std::vector{whole_slice({4, 3})});
  EXPECT_EQ(slices_of_range({4, 3}, 3, 6), std::vector{slice({4, 3}, {1, 0}, {2, 3})});
  EXPECT_EQ(slices_of_range({4, 3}, 1, 10),
            (std::vector{slice({4, 3}, {0, 1}, {1, 2}), slice({4, 3}, {1, 0}, {2, 3}), slice({4, 3}, {3, 0}, {1, 2})}));
  EXPECT_THAT(slices_of_range({4, 0}, 0, 0), IsEmpty());
  for (const auto& [begin, numel] : {std::pair{-1, 2}, {0, 13}, {12, 1}, {13, 0}, {3, -1}}) {
    EXPECT_THROW(slices_of_range({4, 3}, begin, numel), UsageError) << begin << " " << numel;
  }
}

TEST(TensorSlice, Intersects) {
  const auto one = slice({5, 6}, {1, 0}, {3, 4});
  EXPECT_EQ(intersection(one, slice({5, 6}, {2, 3}, {3, 3})), slice({5, 6}, {2, 3}, {2, 1}));
  EXPECT_EQ(intersection(one, whole_slice({5, 6})), one);
  EXPECT_EQ(intersection(one, slice({5, 6}, {4, 0}, {1, 6})), std::nullopt);
  EXPECT_EQ(intersection(whole_slice({}), whole_slice({})), whole_slice({}));
  EXPECT_THROW(intersection(one, whole_slice({6, 5})), UsageError);
}

TEST(TensorSlice, DifferencesAreTheRest) {
  const Numbers shape = {3, 4, 3};
  for (const auto& taken : {slice(shape, {1, 1, 1}, {1, 2, 1}), slice(shape, {0, 0, 0}, {2, 4, 3}), slice(shape, {0, 2, 0}, {3, 2, 1}),
                            slice(shape, {2, 3, 2}, {1, 1, 1}), whole_slice(shape), slice(shape, {0, 0, 0}, {0, 4, 3})}) {
    const auto counts = at::zeros(shape, at::kLong);
    view_of(counts, taken).add_(1);
    for (const auto& rest : difference(whole_slice(shape), taken)) view_of(counts, rest).add_(1);
    EXPECT_TRUE(counts.eq(1).all().item<bool>());
  }
}

TEST(TensorSlice, IsShownAsItWouldBeTaken) {
  EXPECT_EQ(to_string(slice({5, 6}, {1, 0}, {3, 6})), "[1:4, 0:6]");
  EXPECT_EQ(to_string(whole_slice({})), "[]");
}

TEST(TensorSlice, KnowsWhetherItFits) {
  EXPECT_TRUE(slice({4}, {1}, {3}).fits());
  for (const auto& wrong : {slice({4}, {1}, {4}), slice({4}, {-1}, {2}), slice({4}, {2}, {-1}), slice({4}, {0, 0}, {4}),
                            slice({4}, {0}, {}), slice({4}, {INT64_MAX}, {1})}) {
    EXPECT_FALSE(wrong.fits());
  }
  EXPECT_THROW(view_of(at::zeros({4}), whole_slice({5})), UsageError);
}

}  // namespace
}  // namespace tessera::tensor_slice_test
