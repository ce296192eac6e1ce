// Access to what a module has registered, without copies.
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
struct Children {
  using Member = torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> torch::nn::Module::*;
  friend Member member(Children);
};

}  // namespace detail

namespace compat::detail {
template struct Expose<tessera::detail::Children, &torch::nn::Module::children_>;
}

/// The table that `parameters()` reads.
inline torch::OrderedDict<std::string, at::Tensor>& table_of(torch::nn::Module& module) {
  return module.*detail::Tables::parameters();
}
inline const torch::OrderedDict<std::string, at::Tensor>& table_of(const torch::nn::Module& module) {
  return module.*detail::Tables::parameters();
}
inline const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>>& children_of(const torch::nn::Module& module) {
  return module.*member(detail::Children{});
}

}  // namespace tessera
