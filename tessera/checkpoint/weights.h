// Loads weights of any format into a model.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"

namespace tessera::checkpoint {

/// Options of load_weights(): how a model may differ from the weights in the files. Patterns are regular expressions (ECMAScript).
struct WeightsOptions {
  std::vector<std::string> may_be_missing = {};  // whole names, such as "head\\..*", that the files may lack: their values stay
  std::vector<std::string> may_be_unknown = {};  // whole names that the model may lack
  bool first_of_tied = false;                    // if a tied parameter's names have different values, takes the value of the first name
  /// Pairs of a pattern and its replacement, applied to each name in the files one after the other, as by std::regex_replace. The patterns
  /// in may_be_missing and may_be_unknown match the resulting names.
  std::vector<std::pair<std::string, std::string>> renamed = {};
};

/// Copies parameters and buffers into a module, which may be sharded: from a file of safetensors or torch.save, a folder of the Hugging
/// Face Hub or of torch.distributed.checkpoint, or a checkpoint of Tessera. Each rank reads its own part. Throws UsageError and changes
/// nothing unless names and shapes are those of the module. Verifies all checksums first. If the module is sharded, each rank verifies a
/// share of them, the call is collective, and an error on one rank is thrown on all.
void load_weights(ModuleRef module, const std::filesystem::path& path, const WeightsOptions& options = {});

}  // namespace tessera::checkpoint
