// Networks that classify images, and how they are made by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::models {

/// A network that takes images {n, 3, height, width} and returns scores {n, classes}.
struct ImageModel : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& images) = 0;
};

struct ImageModelOptions {
  int64_t classes = 1000;
  int64_t image = 224;
};
std::shared_ptr<ImageModel> make_image_model(const std::string& name, const ImageModelOptions& options = {});
const std::vector<std::string>& image_model_names();
int64_t image_of(const std::string& name);
std::vector<std::pair<std::string, std::string>> renames_of(const std::string& name);

}  // namespace tessera::models
