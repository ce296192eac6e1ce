// Finds the units of a module, and names modules as users do.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;
enum class Recurse;

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
void remember_unit(const torch::nn::Module& module, const std::shared_ptr<Unit>& unit);

/// For example "Linear" for a torch::nn::LinearImpl.
std::string class_name(const torch::nn::Module& module);
/// The path of what a module has under this name: "layers.3" below "layers", "3" below the model, whose path is empty.
std::string path_below(const std::string& path, const std::string& name);

}  // namespace tessera
