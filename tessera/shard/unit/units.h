// What is known of modules: the units that were made of them, what was said about calls of them, and how users name them.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/shard/activation_options.h"
#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// The last part of the name of a unit whose parameters every rank keeps whole: "layers.3.(replicated)".
inline constexpr std::string_view kReplicated = "(replicated)";

/// The units to which the parameters of a module belong, in the order in which `parameters()` lists them. Each unit occurs once.
std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module);

/// The units that were made from this very module: none, one, or one more of the parameters that are replicated.
std::vector<std::shared_ptr<Unit>> units_of(const torch::nn::Module& module);
/// The first of them. Null if fully_shard was called for the module, but all of its parameters are in other units. Throws UsageError if it
/// was not: `what` was asked of a module that is no unit.
std::shared_ptr<Unit> unit_for(const torch::nn::Module& module, std::string_view what);
/// The units to which a setting applies.
std::vector<std::shared_ptr<Unit>> units_for(const torch::nn::Module& module, Recurse recurse, std::string_view what);

/// What was said about calls of a module.
struct Boundary {
  bool is_sharded = false;                          // fully_shard was called for the module
  bool has_units = false;                           // and the module had parameters in units then
  std::weak_ptr<Unit> unit = {};                    // that was made of the module; none if all of its parameters are in other units
  std::optional<at::ScalarType> input_dtype = {},
                                output_dtype = {};  // of floating-point inputs and outputs; they stay as they are if unset
  std::shared_ptr<const activation::Options> checkpointing = {};  // null if the module is no checkpointed segment
};
/// All members have their defaults if nothing was said. So they do if no shared_ptr owns the module, as one does registered modules and
/// those in holders.
Boundary boundary_of(const torch::nn::Module& module);

/// The unit was made of the module. It refuses operators outside of calls of those segments in the module that were set before.
void remember_unit(const torch::nn::Module& module, Unit& unit);
/// fully_shard was called for the module, whose own unit, if there is one, this is.
void remember_sharded(const torch::nn::Module& module, const ShardOptions& options, const std::shared_ptr<Unit>& unit);
/// Calls of the module are checkpointed segments. Its units refuse operators outside of them, which can't be seen then.
void remember_segment(const torch::nn::Module& module, const activation::Options& options);

/// For example "Linear" for a torch::nn::LinearImpl.
std::string class_name(const torch::nn::Module& module);
/// Throws UsageError if a policy names a class that the model has not.
void expect_classes(const std::vector<std::string>& wanted, const std::set<std::string>& of_model);
/// The path of what a module has under this name: "layers.3" below "layers", "3" below the model, whose path is empty.
std::string path_below(const std::string& path, const std::string& name);

}  // namespace tessera
