// From a module to its units.
#pragma once

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// The units that the parameters of a module belong to, in the order of its modules.
std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module);

}  // namespace tessera
