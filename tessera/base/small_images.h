// Convolutions of small images with 1x1 filters, on CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace tessera {

/// These two take the place of libtorch's kernels on CPUs for all convolutions. On one thread, libtorch applies a 1x1 filter to up to 15
/// images one by one, and its products are slow where an image has few pixels, as in the last blocks of a ResNet on ranks of one core each.
/// Here they are one product over all images; anything else is left to libtorch.
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
                    bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32);
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                                                 at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride,
                                                                 at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                                 at::IntArrayRef output_padding, int64_t groups,
                                                                 std::array<bool, 3> output_mask);

}  // namespace tessera
