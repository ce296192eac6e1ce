// The values of a model that this process holds, by name. Checkpoints save them and load into them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/shard/parameters.h"

namespace tessera {

class Unit;

/// The part of a sharded parameter that this process holds.
struct LocalPart {
  std::string name;
  std::vector<int64_t> shape, strides;  // of the unsharded parameter
  at::Tensor values;                    // flat view of the shard's own memory, without the paging key; it may end with padding
  std::vector<ValueRange> ranges;       // one for each rank that this process represents, without padding
  at::Tensor shard = {};                // the listed tensor in which the values lie: of this parameter, or of several (Listing::Flat)
  int64_t offset = 0;                   // where in the shard they begin
};

struct LocalValues {
  std::vector<LocalPart> parts = {};
  std::map<std::string, at::Tensor> outside = {};   // parameters that belong to no unit
  std::map<std::string, at::Tensor> buffers = {};   // only those that are defined
  std::map<std::string, std::string> aliases = {};  // from each further name of a tied parameter to its first name
  std::vector<std::shared_ptr<Unit>> units = {};
  std::set<std::string> layouts = {}, meshes = {};  // of the units, in words
};

/// The ranks among which the model is sharded; nothing if it is not.
std::optional<Communicator> world_of(const torch::nn::Module& model);

/// Throws UsageError if the program may have written the unsharded form of the unit, inside full_params(module, Access::Write).
void expect_shards_current(Unit& unit);

/// Throws UsageError if the module has a shard whose unit no longer exists.
LocalValues local_values(const torch::nn::Module& model);

}  // namespace tessera
