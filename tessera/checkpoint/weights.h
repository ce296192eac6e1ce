// Loads weights of any format into a model.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

/// What a model and the weights that are loaded into it need not have in common. Patterns are regular expressions (ECMAScript).
struct WeightsOptions {
  std::vector<std::string> may_be_missing = {};  // whole names, such as "head\\..*", which keep their values if they are not in the files
  std::vector<std::string> may_be_unknown = {};  // whole names that the model may lack
  bool first_of_tied = false;  // as in LoadOptions: of a tied parameter whose names contradict each other there, the first is taken
  /// What a pattern finds in a name in the files is replaced, as std::regex_replace does, by one pair after the other. The patterns above
  /// are for the names that come out.
  std::vector<std::pair<std::string, std::string>> renamed = {};
};

/// Copies parameters and buffers into a module, which may be sharded: from a file of safetensors or torch.save, a folder of the Hugging
/// Face Hub or of torch.distributed.checkpoint, or a checkpoint of Tessera. Every rank reads its own part of them. Unless the names and
/// shapes are those of the module, it throws UsageError and changes nothing. What has a checksum is compared first, by each rank a share if
/// the module is sharded: then it is collective, and an error on one rank is one on all.
void load_weights(ModuleRef module, const std::filesystem::path& path, const WeightsOptions& options = {});

}  // namespace tessera::checkpoint
