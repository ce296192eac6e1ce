#include "tessera/base/small_images.h"

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kMostImages = 15;
constexpr int64_t kFewPixels = 16;                           // for which one product is faster with any filter
constexpr int64_t kMorePixels = 49, kLargeFilter = 1 << 16;  // with this many values

bool are_all(at::IntArrayRef values, int64_t value) {
  return std::ranges::all_of(values, [&](int64_t each) { return each == value; });
}

/// Whether it has float32 values in the order in which products over pixels are slow. With channels last they are fast.
bool is_pixels_last(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

bool are_small(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, bool transposed,
               int64_t groups) {
  if (transposed || groups != 1 || !are_all(stride, 1) || !are_all(padding, 0)) return false;
  if (input.dim() < 3 || input.dim() != weight.dim() || input.numel() == 0 || input.size(1) != weight.size(1)) return false;
  const bool is_1x1 = weight.numel() > 0 && weight.numel() == weight.size(0) * weight.size(1);
  const auto images = input.size(0), pixels = input.numel() / (images * input.size(1));
  const bool is_small = pixels <= (weight.numel() < kLargeFilter ? kFewPixels : kMorePixels);
  return is_1x1 && is_small && images > 1 && images <= kMostImages && is_pixels_last(input) && is_pixels_last(weight) &&
         at::get_num_threads() == 1;
}

/// {images, channels, ...} as {images * pixels, channels}.
at::Tensor to_rows(const at::Tensor& images) {
  return images.flatten(2).transpose(1, 2).reshape({-1, images.size(1)});
}

at::Tensor to_images(const at::Tensor& rows, at::IntArrayRef sizes) {
  auto images = at::empty(sizes, rows.options());
  images.flatten(2).copy_(rows.view({sizes[0], -1, sizes[1]}).transpose(1, 2));
  return images;
}

}  // namespace

at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
                    bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32) {
  const bool has_bias = bias && bias->defined();
  const bool bias_fits = !has_bias || (bias->scalar_type() == at::kFloat && bias->sizes() == weight.sizes().slice(0, 1));
  if (!bias_fits || !are_small(input, weight, stride, padding, transposed, groups))
    return at::compositeexplicitautograd::_convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
                                                       benchmark, deterministic, cudnn_enabled, allow_tf32);
  const auto rows = to_rows(input), matrix = weight.flatten(1).t();
  auto sizes = input.sizes().vec();
  sizes[1] = weight.size(0);
  return to_images(has_bias ? at::cpu::addmm(*bias, rows, matrix) : at::cpu::mm(rows, matrix), sizes);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                                 at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride,
                                                                 at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                                 at::IntArrayRef output_padding, int64_t groups,
                                                                 std::array<bool, 3> output_mask) {
  if (grad.scalar_type() != at::kFloat || !are_small(input, weight, stride, padding, transposed, groups))
    return at::compositeexplicitautograd::convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                                               output_padding, groups, output_mask);
  const auto rows = to_rows(grad);
  at::Tensor of_input, of_weight, of_bias;
  if (output_mask[0]) of_input = to_images(at::cpu::mm(rows, weight.flatten(1)), input.sizes());
  if (output_mask[1]) of_weight = at::cpu::mm(rows.t(), to_rows(input)).view(weight.sizes());
  if (output_mask[2]) of_bias = rows.sum(0);
  return {of_input, of_weight, of_bias};
}

}  // namespace tessera
