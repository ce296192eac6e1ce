// The way back after an error that has brought the ranks out of step.
#pragma once

namespace torch::nn {
class Module;
}

namespace tessera {

/// Every rank calls it where it has caught an exception of a forward or backward pass, its own or one that told of another rank's. What was
/// under way is given up and all gradients of the model are dropped; then the ranks go on together, with the next batch. Collective, and
/// the only one that ranks may come to from different places. Throws CommError if they have taken different steps already: then only a
/// checkpoint brings them together.
void recover(const torch::nn::Module& model);

}  // namespace tessera
