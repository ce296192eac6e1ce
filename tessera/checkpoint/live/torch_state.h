// Reads and loads the state of optimizers of torch::optim by the names of parameters, as optim::Optimizer does for its own state.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
}

namespace tessera::checkpoint {

/// A parameter group of an optimizer, with its settings under Python's names.
struct PythonGroup {
  nlohmann::json settings;
  std::vector<at::Tensor> parameters;
};
/// Returns the settings of a group of Adam, AdamW, SGD, Adagrad or RMSprop; of other classes only the learning rate.
nlohmann::json torch_settings(const torch::optim::OptimizerOptions& options);

/// Returns the optimizer's own tensors, not copies. Throws UsageError for other classes than these five.
std::map<std::string, optim::ParameterState> torch_state(torch::optim::Optimizer& optimizer, const torch::nn::Module& model);
/// Throws UsageError if load_torch_state would.
void expect_torch_state(torch::optim::Optimizer& optimizer, const torch::nn::Module& model,
                        const std::map<std::string, optim::ParameterState>& state);
/// Does what optim::Optimizer::load_state does.
void load_torch_state(torch::optim::Optimizer& optimizer, const torch::nn::Module& model,
                      const std::map<std::string, optim::ParameterState>& state);

}  // namespace tessera::checkpoint
