// Modules that are checkpointed segments wherever they are called.
#pragma once

#include <memory>

#include "tessera/shard/activation.h"

namespace tessera {
class Unit;
}

namespace tessera::activation {

/// Remembers the options as long as the module exists. It must be owned by a shared_ptr.
void mark(const torch::nn::Module& module, const Options& options);

/// Null if the module is not marked.
std::shared_ptr<const Options> mark_of(const torch::nn::Module& module);

/// Lets the unit refuse operators on parameters of the marked modules in this one outside of their calls, which can't be seen then.
void need_marked_calls(const torch::nn::Module& module, const Unit& unit);

}  // namespace tessera::activation
