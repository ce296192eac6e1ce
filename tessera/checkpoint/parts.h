// The values of a model that this rank has, by name: what a checkpoint saves of it, and loads into.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {
class Unit;
}

namespace tessera::checkpoint {

/// This rank's part of a sharded parameter.
struct Part {
  std::string name;
  std::vector<int64_t> sizes, strides;  // of the whole one
  int64_t begin = 0;                    // of its values, in the order in which they lie in memory
  at::Tensor values;                    // flat; the rank's own memory, without the paging key
};

struct ModelParts {
  std::vector<Part> parts = {};
  std::map<std::string, at::Tensor> whole = {};     // parameters in no unit
  std::map<std::string, at::Tensor> buffers = {};   // defined ones
  std::map<std::string, std::string> aliases = {};  // further names of a parameter, and its first
  std::vector<std::shared_ptr<Unit>> units = {};
};

ModelParts parts_of(const torch::nn::Module& model);

}  // namespace tessera::checkpoint
