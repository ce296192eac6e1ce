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

/// The last part of the name of a unit whose parameters every rank keeps whole: "layers.3.(replicated)".
inline constexpr std::string_view kReplicated = "(replicated)";

/// The units to which the parameters of a module belong, in the order in which `parameters()` lists them. Each unit occurs once.
std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module);

/// For example "Linear" for a torch::nn::LinearImpl.
std::string class_name(const torch::nn::Module& module);
/// The path of what a module has under this name: "layers.3" below "layers", "3" below the model, whose path is empty.
std::string path_below(const std::string& path, const std::string& name);

}  // namespace tessera
