// Finds the units of a module.
#pragma once

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// The units to which the parameters of a module belong, in the order in which `parameters()` lists them. Each unit occurs once.
std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module);

}  // namespace tessera
