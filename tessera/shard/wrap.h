// Policies: which modules of a model become units.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/shard/fully_shard.h"

namespace tessera {

/// The facts about a module by which a policy decides.
struct ModuleInfo {
  const torch::nn::Module& module;
  std::string name;        // the module's path in the model: "encoder.layer.3"
  std::string class_name;  // "BertLayer", for a class BertLayer or BertLayerImpl in any namespace
  int64_t numel = 0;       // number of values in its parameters that no unit below it has taken, and that are not ignored or left out
};

/// A rule by which modules of a model become units. It is asked about every module except the model itself, inner modules first.
struct WrapPolicy {
  std::function<bool(const ModuleInfo& info)> chooses;
  std::vector<std::string> classes = {};  // the model must have at least one module of each class
  std::vector<std::string> leaves = {};   // classes inside whose modules nothing is chosen
  /// Returns the options of a chosen module if they differ from the model's: another mesh, precision or rule for resharding. `ignored`,
  /// `replicated` and `left_out` are set in the model's options only.
  std::function<std::optional<ShardOptions>(const ModuleInfo& info)> options = {};
  /// Chosen modules that are neighbours in a module and have fewer values than this become one unit, of at most this many values. Modules
  /// with options of their own stay alone.
  int64_t merge_below = 0;
};

/// Chooses every module that has parameters of its own.
WrapPolicy wrap_always();

/// Chooses every module of these classes, such as {"BertLayer"}. fully_shard and checkpoint_modules throw UsageError if the model has no
/// module of one of these classes.
WrapPolicy wrap_classes(std::vector<std::string> classes);

struct WrapSizeOptions {
  int64_t min_params = 100'000'000;                          // the least number of values in a unit
  std::vector<std::string> leaves = {"MultiheadAttention"};  // classes inside whose modules nothing is chosen
  std::vector<std::string> exclude = {"ModuleList", "ModuleDict"};
};

/// Chooses every module with at least min_params values that no unit below it has taken.
WrapPolicy wrap_by_size(WrapSizeOptions options = {});

/// The parameters of all modules whose whole path in the model matches a regular expression (ECMAScript), each once: for the lists
/// `ignored`, `replicated` and `left_out` of ShardOptions. Throws UsageError if no module matches.
std::vector<at::Tensor> parameters_of_modules(ConstModuleRef model, const std::string& pattern);
/// The same for buffers, for the list `ignored`: ignored buffers keep their dtype.
std::vector<at::Tensor> buffers_of_modules(ConstModuleRef model, const std::string& pattern);

/// Makes a unit of each module that the policy chooses, and a unit of the remaining parameters of the model. A parameter that is tied
/// across modules goes to the innermost unit that contains all of its places. Collective, as fully_shard.
void fully_shard(ModuleRef model, const ShardOptions& options, const WrapPolicy& policy);

}  // namespace tessera
