#include "tessera/checkpoint/optimizer_ref.h"

#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <typeinfo>

#include "tessera/checkpoint/live/torch_state.h"
#include "tessera/optim/optimizer.h"

namespace tessera::checkpoint {

std::string OptimizerRef::class_name() const {
  if (own_ != nullptr) return c10::demangle(typeid(*own_).name());
  return torch_ != nullptr ? c10::demangle(typeid(*torch_).name()) : "";
}

std::map<std::string, optim::ParameterState> OptimizerRef::state(const torch::nn::Module& model) const {
  return own_ != nullptr ? own_->state(model) : torch_state(*torch_, model);
}

void OptimizerRef::expect_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const {
  own_ != nullptr ? own_->expect_state(model, state) : expect_torch_state(*torch_, model, state);
}

void OptimizerRef::load_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const {
  own_ != nullptr ? own_->load_state(model, state) : load_torch_state(*torch_, model, state);
}

}  // namespace tessera::checkpoint
