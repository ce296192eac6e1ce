// A 1x1 filter of small images has libtorch's values and gradients, and its images are not taken one by one.
#include "tessera/base/small_images.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

namespace tessera::testing::small_images_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

thread_local std::set<std::string>* names = nullptr;

/// Notes the operators that this thread calls, while it computes with one thread.
class Calls {
 public:
  Calls() : threads_(at::get_num_threads()) {
    at::set_num_threads(1);
    names = &called;
    const auto note = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
      names->insert(call.name());
      return nullptr;
    };
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
  ~Calls() {
    at::removeCallback(handle_);
    at::set_num_threads(threads_);
  }

  std::set<std::string> called;

 private:
  int threads_;
  at::CallbackHandle handle_;
};

struct Results {
  at::Tensor y;
  std::vector<at::Tensor> gradients;
};

Results compute(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::ScalarType dtype) {
  std::vector<at::Tensor> leaves;
  for (const auto& each : {x, weight, bias}) leaves.push_back(each.defined() ? each.to(dtype).detach().requires_grad_() : at::Tensor());
  const auto y = at::convolution(leaves[0], leaves[1], leaves[2], 1, 0, 1, false, 0, 1);
  (y * at::arange(y.numel(), y.options()).view(y.sizes()).sin()).sum().backward();
  Results results{.y = y.detach(), .gradients = {}};
  for (const auto& leaf : leaves) results.gradients.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
  return results;
}

/// Against float64, which libtorch computes by itself.
void expect_right(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const Calls calls;
  const auto found = compute(x, weight, bias, at::kFloat), expected = compute(x, weight, bias, at::kDouble);
  EXPECT_EQ(found.y.strides(), expected.y.strides());
  EXPECT_TRUE(at::allclose(found.y.to(at::kDouble), expected.y, 1e-5, 1e-5));
  for (size_t i = 0; i < found.gradients.size(); i++) {
    if (!expected.gradients[i].defined()) continue;
    EXPECT_EQ(found.gradients[i].sizes(), expected.gradients[i].sizes());
    EXPECT_TRUE(at::allclose(found.gradients[i].to(at::kDouble), expected.gradients[i], 1e-5, 1e-4)) << i;
  }
}

TEST(SmallImages, HaveTheValuesAndGradientsOfLibtorch) {
  torch::manual_seed(1);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 5, 3, 3},
                                                             {2, 5, 1, 1},
                                                             {15, 5, 7, 7},
                                                             {3, 5, 6},
                                                             {3, 5, 2, 2, 2},
                                                             {1, 5, 3, 3},
                                                             {16, 5, 3, 3},
                                                             {4, 5, 8, 8},
                                                             {4, 256, 7, 7}}) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    auto filter = sizes;
    std::ranges::fill(filter, 1);
    filter[0] = sizes[1] == 256 ? 256 : 6;
    filter[1] = sizes[1];
    const auto x = at::randn(sizes), weight = at::randn(filter) / std::sqrt(sizes[1]);
    expect_right(x, weight, at::randn({filter[0]}));
    expect_right(x, weight, {});
  }
  // Every second pixel, as it lies in a larger image.
  using torch::indexing::Slice;
  expect_right(at::randn({4, 5, 6, 6}).index({Slice(), Slice(), Slice(0, 6, 2), Slice(0, 6, 2)}), at::randn({6, 5, 1, 1}), at::randn({6}));
}

TEST(SmallImages, KeepChannelsLast) {
  const auto x = at::randn({4, 5, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(at::conv2d(x, at::randn({6, 5, 1, 1})).is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(SmallImages, AreOneProduct) {
  const Calls calls;
  const auto x = at::randn({4, 5, 3, 3}).requires_grad_(), weight = at::randn({6, 5, 1, 1}).requires_grad_();
  at::conv2d(x, weight).sum().backward();
  EXPECT_THAT(calls.called, Contains("aten::convolution_backward"));
  EXPECT_THAT(calls.called, Not(Contains(HasSubstr("slow_conv2d"))));
}

TEST(SmallImages, HaveTheErrorsOfLibtorch) {
  const Calls calls;
  const auto x = at::ones({4, 5, 3, 3});
  EXPECT_THROW(at::conv2d(x, at::ones({6, 4, 1, 1})), c10::Error);
  EXPECT_THROW(at::conv2d(x, at::ones({6, 5, 1, 1}), at::ones({5})), c10::Error);
  EXPECT_THROW(at::conv2d(x, at::ones({6, 5, 1, 1}, at::kDouble)), c10::Error);
}

}  // namespace
}  // namespace tessera::testing::small_images_test
