// ShardMetadata: which parameters the shards of a module hold, as in XlaFullyShardedDataParallel.get_shard_metadata(). Checkpoints of
// Tessera contain the same facts, without this function.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"

namespace tessera {

class Communicator;

struct ShardMetadata {
  /// A tensor that `parameters()` lists: a shard of one parameter or, with flat parameters, of a vector of them.
  struct Shard {
    std::string name;           // the name in the module from which the unit was made
    std::string original_name;  // the name in the module that was passed to shard_metadata()
    std::vector<int64_t> original_size;
  };
  /// The parameters in a flat vector.
  struct Flat {
    std::vector<std::string> names;
    std::vector<std::vector<int64_t>> shapes;
    std::vector<int64_t> numels;
  };

  std::map<std::string, std::vector<Shard>> shard_info = {};  // keyed by the name of the unit
  std::map<std::string, Flat> flatten_info = {};              // keyed by Shard::original_name
  std::map<std::string, at::ScalarType> buffer_info = {};     // the original dtypes of buffers that were cast, keyed by the buffer's name
  int world_size = 1, rank = 0;

  std::string to_json() const;
};

ShardMetadata shard_metadata(ConstModuleRef module, const Communicator& world);

}  // namespace tessera
