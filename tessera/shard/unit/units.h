// Remembers for each module the units that were made of it, and the options that act at its calls. Also finds names of modules for
// messages.
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

/// The units that were made from this module itself: none, one, or two if it has replicated parameters.
std::vector<std::shared_ptr<Unit>> units_of(const torch::nn::Module& module);
/// Returns the first unit that was made from this module itself, or null if fully_shard was called for the module, but all of its
/// parameters are in other units. Throws UsageError, which names the call `what`, if fully_shard was not called for it.
std::shared_ptr<Unit> unit_for(const torch::nn::Module& module, std::string_view what);
/// Returns the units to which a setting of the module applies: unit_for() with Recurse::No, else all units of its parameters.
std::vector<std::shared_ptr<Unit>> units_for(const torch::nn::Module& module, Recurse recurse, std::string_view what);

/// The options that act at calls of a module.
struct Boundary {
  bool is_sharded = false;        // fully_shard was called for the module
  bool has_units = false;         // the module had parameters in units when fully_shard was called
  std::weak_ptr<Unit> unit = {};  // the unit that was made of the module; null if all of its parameters are in other units
  std::optional<at::ScalarType> input_dtype = {},
                                output_dtype = {};  // dtypes to which floating-point inputs and outputs are cast; unset: not cast
  std::shared_ptr<const activation::Options> checkpointing = {};  // null if the module is not a checkpointed segment
};
/// Returns what was remembered for the module. All members have their defaults if nothing was remembered, or if no shared_ptr owns the
/// module. A shared_ptr owns every registered module and every module in a holder.
Boundary boundary_of(const torch::nn::Module& module);

/// Remembers that the unit was made of the module. If the module has checkpointed segments already (remember_segment), the unit refuses
/// operators outside of calls of these segments.
void remember_unit(const torch::nn::Module& module, Unit& unit);
/// Remembers that fully_shard was called for the module. `unit`: its own unit, or null.
void remember_sharded(const torch::nn::Module& module, const ShardOptions& options, const std::shared_ptr<Unit>& unit);
/// Makes calls of the module checkpointed segments. Its units refuse operators outside of such calls, because Tessera can't see plain
/// calls.
void remember_segment(const torch::nn::Module& module, const activation::Options& options);

/// For example "Linear" for a torch::nn::LinearImpl.
std::string class_name(const torch::nn::Module& module);
/// Throws UsageError if a policy names a class that the model does not have.
void expect_classes(const std::vector<std::string>& wanted, const std::set<std::string>& of_model);
/// Returns the path of a child or tensor of this name: "layers.3" below "layers", "3" below the model, whose path is empty.
std::string path_below(const std::string& path, const std::string& name);

}  // namespace tessera
