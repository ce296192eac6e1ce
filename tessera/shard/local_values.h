// The values of a model that this process has, by name: what is saved of it, and loaded into.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/shard/parameters.h"

namespace tessera {

class Unit;

/// A sharded parameter, as far as this process has it.
struct LocalPart {
  std::string name;
  std::vector<int64_t> shape, strides;  // of the unsharded parameter
  at::Tensor values;                    // flat; the shard's own memory, without the paging key, with the padding that may end it
  std::vector<ValueRange> ranges;       // of each rank that the process stands for, without padding
};

struct LocalValues {
  std::vector<LocalPart> parts = {};
  std::map<std::string, at::Tensor> whole = {};     // parameters in no unit
  std::map<std::string, at::Tensor> buffers = {};   // defined ones
  std::map<std::string, std::string> aliases = {};  // further names of a parameter, and its first
  std::vector<std::shared_ptr<Unit>> units = {};

  /// Of the sharded parameters, if there are any.
  const Communicator& world() const;
};

/// Throws UsageError where the module has a shard of a unit that is gone.
LocalValues local_values(const torch::nn::Module& model);

}  // namespace tessera
