// Indices outside of their dimension: a read gives the nearest element, and a write does nothing.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

using torch::indexing::TensorIndex;

at::Tensor on_xla(const at::Tensor& values) {
  return values.to(device_for_tests());
}
at::Tensor grid() {
  return torch::arange(12, torch::kFloat).view({3, 4});
}
at::Tensor columns() {
  return torch::tensor({{4, 1}, {-1, 5}, {0, 3}});
}
/// Rows and columns of a grid, of which only the first pair lies inside. Numbers from -1 down count from the end.
std::vector<TensorIndex> pairs() {
  return {on_xla(torch::tensor({1, 0, 3, -4})), on_xla(torch::tensor({-1, 4, 1, 2}))};
}

void expect_values(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(actual.cpu(), expected)) << actual.cpu() << expected;
}

TEST(IndicesOutside, ReadTheNearestPlaceOfTheirRow) {
  const auto x = on_xla(grid());
  expect_values(x.gather(1, on_xla(columns())), grid().gather(1, columns().clamp(0, 3)));
  expect_values(x.index(pairs()), torch::tensor({7.0F, 3.0F, 9.0F, 2.0F}));
  expect_values(x.index_select(1, on_xla(torch::tensor({9, 0}))), grid().index_select(1, torch::tensor({3, 0})));
  expect_values(x.take(on_xla(torch::tensor({12, 3}))), torch::tensor({11.0F, 3.0F}));
}

TEST(IndicesOutside, AreNotWritten) {
  auto expected = grid();
  expected[0][1] = 50, expected[2][0] = 50, expected[2][3] = 50;
  expect_values(on_xla(grid()).scatter(1, on_xla(columns()), 50), expected);
  expect_values(on_xla(grid()).scatter_add(1, on_xla(columns()), on_xla(torch::ones({3, 2}))), grid() + (expected == 50));
  expect_values(on_xla(grid()).scatter_reduce(1, on_xla(columns()), on_xla(torch::full({3, 2}, 50.0F)), "amax"), expected);

  expected = grid();
  expected[1][3] = 50;
  expect_values(on_xla(grid()).index_put_(pairs(), torch::tensor(50.0F)), expected);
}

}  // namespace
}  // namespace tessera::xla
