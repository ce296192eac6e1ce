// A convolution between norms, as ResNets and DenseNets have them.
#pragma once

#include <torch/nn/modules/conv.h>

#include <cstdint>

namespace tessera::models {

/// Of stride 1 it keeps height and width. A norm behind it stands in for a bias.
inline torch::nn::Conv2d padded_convolution(int64_t in, int64_t out, int64_t size, int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

}  // namespace tessera::models
