// Access to the parameters and children that a module has registered, without copies.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "tessera/base/compat.h"

namespace tessera {

namespace detail {
struct Tables : torch::nn::Module {
  static auto parameters() { return &Tables::parameters_; }
};
}  // namespace detail

namespace compat::detail {
struct Children {
  using Member = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> torch::nn::Module::*;
  friend Member member(Children);
};
template struct Expose<Children, &torch::nn::Module::children_>;
}  // namespace compat::detail

/// The table that `parameters()` reads.
inline torch::OrderedDict<std::string, at::Tensor>& table_of(torch::nn::Module& module) {
  return module.*detail::Tables::parameters();
}
inline const torch::OrderedDict<std::string, at::Tensor>& table_of(const torch::nn::Module& module) {
  return module.*detail::Tables::parameters();
}
inline const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& children_of(const torch::nn::Module& module) {
  return module.*member(compat::detail::Children{});
}

}  // namespace tessera
