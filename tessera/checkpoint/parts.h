// The values of a model that this process has, by name: what a checkpoint saves of it, and loads into.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/rank_file.h"

namespace torch::nn {
class Module;
}

namespace tessera {
class Unit;
}

namespace tessera::checkpoint {

/// A sharded parameter, as far as this process has it.
struct Part {
  std::string name;
  at::Tensor values;                // flat; the shard's own memory, without the paging key, with the padding that may end it
  std::vector<PartRecord> records;  // of each local rank's
};

struct ModelParts {
  std::vector<Part> parts = {};
  std::map<std::string, at::Tensor> whole = {};     // parameters in no unit
  std::map<std::string, at::Tensor> buffers = {};   // defined ones
  std::map<std::string, std::string> aliases = {};  // further names of a parameter, and its first
  std::vector<std::shared_ptr<Unit>> units = {};
};

ModelParts parts_of(const torch::nn::Module& model);

/// All values are about to come from a file: what is whole is stale, and how the ranks began does not matter any more.
void about_to_replace(const ModelParts& model);

}  // namespace tessera::checkpoint
