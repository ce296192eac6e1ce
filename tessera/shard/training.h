// What takes part in the next step: which parameters train, and whether this rank steps at all.
#pragma once

namespace torch::nn {
class Module;
}

namespace tessera {

/// Freezes or thaws all parameters of a module from its next forward pass on. Also the way for parameters that are sharded.
enum class Training { Frozen, Trained };
void set_requires_grad(const torch::nn::Module& module, Training training);

/// Says that this rank leaves out a step that others take with an optimizer of torch::optim over the parameters of the module that have
/// gradients. (Ours have a skip_step() of their own.)
void skip_step(const torch::nn::Module& module);

}  // namespace tessera
