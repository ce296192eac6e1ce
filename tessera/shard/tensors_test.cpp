// for_each_tensor_in over values of all kinds.
#include "tessera/shard/tensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace tessera::testing::tensors_test {
namespace {

struct Own {
  at::Tensor tensor;
};

static_assert(kHasTensors<const at::Tensor&> && kHasTensors<std::vector<std::optional<at::Tensor>>>);
static_assert(kHasTensors<std::tuple<int, std::pair<std::string, std::array<at::Tensor, 2>>>>);
static_assert(!kHasTensors<int> && !kHasTensors<std::vector<std::string>> && !kHasTensors<std::unique_ptr<int>> && !kHasTensors<Own>);

/// The sum of all tensors in a value after each was replaced by its double.
template <class T>
double doubled(T value) {
  for_each_tensor_in(value, [](at::Tensor& tensor) { tensor = tensor * 2; });
  double sum = 0;
  for_each_tensor_in(value, [&](const at::Tensor& tensor) { sum += tensor.sum().item<double>(); });
  return sum;
}

TEST(Tensors, AreFoundInEveryKindOfValue) {
  const auto one = at::ones({}), two = at::full({}, 2);
  EXPECT_EQ(doubled(one), 2);
  EXPECT_EQ(doubled(at::Tensor()), 0);
  EXPECT_EQ(doubled(std::optional(one)), 2);
  EXPECT_EQ(doubled(std::optional<at::Tensor>()), 0);
  EXPECT_EQ(doubled(std::vector{one, two}), 6);
  EXPECT_EQ(doubled(std::array{one, two}), 6);
  EXPECT_EQ(doubled(std::tuple(one, 5, two)), 6);
  EXPECT_EQ(doubled(std::pair(one, std::string("x"))), 2);
  EXPECT_EQ(doubled(std::map<std::string, at::Tensor>{{"a", one}, {"b", two}}), 6);
  EXPECT_EQ(doubled(std::unordered_map<int, at::Tensor>{{1, one}, {2, two}}), 6);
  torch::OrderedDict<std::string, at::Tensor> dict;
  dict.insert("a", one);
  EXPECT_EQ(doubled(dict), 2);
  EXPECT_EQ(doubled(std::tuple(std::vector{std::pair(one, std::optional(two))}, std::map<int, std::vector<at::Tensor>>{{1, {one}}})), 8);
}

TEST(Tensors, OfAPackedSequenceAreItsData) {
  auto packed = torch::nn::utils::rnn::pack_padded_sequence(at::ones({3, 2, 4}), torch::tensor({3, 1}));
  const auto sizes = packed.batch_sizes();
  for_each_tensor_in(packed, [](at::Tensor& tensor) { tensor = tensor.to(at::kBFloat16); });
  EXPECT_EQ(packed.data().scalar_type(), at::kBFloat16);
  EXPECT_EQ(packed.data().sizes(), at::IntArrayRef({4, 4}));
  EXPECT_TRUE(packed.batch_sizes().is_same(sizes));
}

}  // namespace
}  // namespace tessera::testing::tensors_test
