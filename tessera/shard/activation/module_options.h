// Which modules are checkpointed segments wherever they are called, and how.
#pragma once

#include <memory>

#include "tessera/shard/activation_options.h"

namespace tessera {
class Unit;
}

namespace tessera::activation {

/// Remembers the options as long as the module exists. It must be owned by a shared_ptr.
void set_options(const torch::nn::Module& module, const Options& options);

/// Null if the module is no segment.
std::shared_ptr<const Options> options_of(const torch::nn::Module& module);

/// Lets the unit refuse operators on parameters of such modules in this one outside of their calls, which can't be seen then.
void need_calls_of_segments(const torch::nn::Module& module, const Unit& unit);

}  // namespace tessera::activation
