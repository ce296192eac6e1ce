#include "tessera/models/mnist.h"

#include <ATen/ATen.h>

namespace tessera::models {

MnistNetImpl::MnistNetImpl() {
  using torch::nn::BatchNorm2d, torch::nn::Conv2d, torch::nn::Conv2dOptions, torch::nn::Linear;
  conv1 = register_module("conv1", Conv2d(Conv2dOptions(1, 10, 5)));
  bn1 = register_module("bn1", BatchNorm2d(10));
  conv2 = register_module("conv2", Conv2d(Conv2dOptions(10, 20, 5)));
  bn2 = register_module("bn2", BatchNorm2d(20));
  fc1 = register_module("fc1", Linear(320, 50));
  fc2 = register_module("fc2", Linear(50, 10));
}

at::Tensor MnistNetImpl::forward(const at::Tensor& images) {
  auto x = bn1(at::relu(at::max_pool2d(conv1(images), 2)));
  x = bn2(at::relu(at::max_pool2d(conv2(x), 2)));
  return at::log_softmax(fc2(at::relu(fc1(x.flatten(1)))), 1);
}

}  // namespace tessera::models
