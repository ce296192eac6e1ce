#include "tessera/models/inception.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <numeric>

namespace tessera::models {
namespace {

struct InceptionRow {
  std::string name;
  std::vector<InceptionStep> steps;
};

/// The blocks, one behind the other.
std::vector<InceptionRow> inception_rows() {
  using enum InceptionStep::From;
  using Steps = std::vector<InceptionStep>;
  const auto a = [](int64_t pooled) {
    return Steps{{"branch1x1", Block, 64},       {"branch5x5_1", Block, 48},           {"branch5x5_2", Step, 64, {5, 5}},
                 {"branch3x3dbl_1", Block, 64},  {"branch3x3dbl_2", Step, 96, {3, 3}}, {"branch3x3dbl_3", Step, 96, {3, 3}},
                 {"branch_pool", Pooled, pooled}};
  };
  const Steps b = {{"branch3x3", Block, 384, {3, 3}, 2},
                   {"branch3x3dbl_1", Block, 64},
                   {"branch3x3dbl_2", Step, 96, {3, 3}},
                   {"branch3x3dbl_3", Step, 96, {3, 3}, 2}};
  const auto c = [](int64_t width) {
    return Steps{{"branch1x1", Block, 192},
                 {"branch7x7_1", Block, width},
                 {"branch7x7_2", Step, width, {1, 7}},
                 {"branch7x7_3", Step, 192, {7, 1}},
                 {"branch7x7dbl_1", Block, width},
                 {"branch7x7dbl_2", Step, width, {7, 1}},
                 {"branch7x7dbl_3", Step, width, {1, 7}},
                 {"branch7x7dbl_4", Step, width, {7, 1}},
                 {"branch7x7dbl_5", Step, 192, {1, 7}},
                 {"branch_pool", Pooled, 192}};
  };
  const Steps d = {{"branch3x3_1", Block, 192},          {"branch3x3_2", Step, 320, {3, 3}, 2}, {"branch7x7x3_1", Block, 192},
                   {"branch7x7x3_2", Step, 192, {1, 7}}, {"branch7x7x3_3", Step, 192, {7, 1}},  {"branch7x7x3_4", Step, 192, {3, 3}, 2}};
  const Steps e = {{"branch1x1", Block, 320},
                   {"branch3x3_1", Block, 384},
                   {"branch3x3_2a", Step, 384, {1, 3}},
                   {"branch3x3_2b", Beside, 384, {3, 1}},
                   {"branch3x3dbl_1", Block, 448},
                   {"branch3x3dbl_2", Step, 384, {3, 3}},
                   {"branch3x3dbl_3a", Step, 384, {1, 3}},
                   {"branch3x3dbl_3b", Beside, 384, {3, 1}},
                   {"branch_pool", Pooled, 192}};
  return {{"Mixed_5b", a(32)},  {"Mixed_5c", a(64)},  {"Mixed_5d", a(64)}, {"Mixed_6a", b}, {"Mixed_6b", c(128)}, {"Mixed_6c", c(160)},
          {"Mixed_6d", c(160)}, {"Mixed_6e", c(192)}, {"Mixed_7a", d},     {"Mixed_7b", e}, {"Mixed_7c", e}};
}

/// Calls make(i, input) for each step and returns what no other step has taken.
template <class T, class Make>
std::vector<T> ends_of(const std::vector<InceptionStep>& steps, const T& of_block, const Make& make) {
  using enum InceptionStep::From;
  std::vector<T> ends;
  auto input = of_block;
  for (size_t i = 0; i < steps.size(); i++) {
    const auto from = steps[i].from;
    if (from == Block || from == Pooled) input = of_block;
    if (from == Step) {
      input = ends.back();
      ends.pop_back();
    }
    ends.push_back(make(i, input));
  }
  return ends;
}

at::Tensor largest_of_3x3(const at::Tensor& x) {
  return at::max_pool2d(x, 3, 2);
}

}  // namespace

InceptionConvolutionImpl::InceptionConvolutionImpl(const torch::nn::Conv2dOptions& options, bool pools)
    : pools(pools),
      conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(options).bias(false)))),
      bn(register_module("bn", torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(options.out_channels()).eps(1e-3)))) {}

at::Tensor InceptionConvolutionImpl::forward(const at::Tensor& x) {
  const auto y = conv(x);
  return at::relu(bn(pools ? at::avg_pool2d(y, 3, 1, 1) : y));
}

InceptionBlockImpl::InceptionBlockImpl(int64_t in, const std::vector<InceptionStep>& table) : steps(table) {
  const auto ends = ends_of(steps, in, [&](size_t i, int64_t from) {
    const auto& step = steps[i];
    torch::nn::Conv2dOptions options(from, step.channels, {step.size[0], step.size[1]});
    options.stride(step.stride);
    if (step.stride == 1) options.padding({step.size[0] / 2, step.size[1] / 2});
    // A convolution of single pixels may come before means of pixels or after them, and it has fewer channels than the block is given.
    convolutions.emplace_back(
        register_module(step.name, InceptionConvolution(options, /*pools=*/step.from == InceptionStep::From::Pooled)));
    return step.channels;
  });
  reduces = std::ranges::any_of(steps, [](const InceptionStep& step) { return step.stride > 1; });
  channels = std::accumulate(ends.begin(), ends.end(), reduces ? in : 0);
}

at::Tensor InceptionBlockImpl::forward(const at::Tensor& x) {
  auto ends = ends_of(steps, x, [&](size_t i, const at::Tensor& from) { return convolutions[i](from); });
  if (reduces) ends.push_back(largest_of_3x3(x));
  return at::cat(ends, 1);
}

InceptionImpl::InceptionImpl(const InceptionOptions& options) {
  const auto add_to_stem = [&](const std::string& name, const torch::nn::Conv2dOptions& convolution) {
    stem.emplace_back(register_module(name, InceptionConvolution(convolution)));
  };
  add_to_stem("Conv2d_1a_3x3", torch::nn::Conv2dOptions(3, 32, 3).stride(2));
  add_to_stem("Conv2d_2a_3x3", torch::nn::Conv2dOptions(32, 32, 3));
  add_to_stem("Conv2d_2b_3x3", torch::nn::Conv2dOptions(32, 64, 3).padding(1));
  add_to_stem("Conv2d_3b_1x1", torch::nn::Conv2dOptions(64, 80, 1));
  add_to_stem("Conv2d_4a_3x3", torch::nn::Conv2dOptions(80, 192, 3));
  int64_t channels = 192;
  for (const auto& row : inception_rows()) {
    blocks.emplace_back(register_module(row.name, InceptionBlock(channels, row.steps)));
    channels = blocks.back()->channels;
  }
  dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
  fc = register_module("fc", torch::nn::Linear(channels, options.classes));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const convolution = module->as<torch::nn::Conv2d>()) torch::nn::init::normal_(convolution->weight, 0, 0.1);
  }
  torch::nn::init::normal_(fc->weight, 0, 0.1);
}

at::Tensor InceptionImpl::forward(const at::Tensor& images) {
  auto x = images;
  for (size_t i = 0; i < stem.size(); i++) {
    x = stem[i](x);
    if (i == 2 || i == 4) x = largest_of_3x3(x);
  }
  for (const auto& block : blocks) x = block(x);
  return fc(dropout(x.mean({2, 3})));
}

}  // namespace tessera::models
