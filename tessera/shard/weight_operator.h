// What runs in place of the operator by which a layer of libtorch applies its weight: the layer's own forward can't be replaced.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/base/no_copy.h"
#include "tessera/shard/weight_forms.h"

namespace torch::nn {
class Module;
}

namespace tessera {

/// From now on, in place of one that was set before. The weight may be sharded now or later, or not at all. With an empty function the
/// operators run as they are again.
void replace_weight_operator(const at::Tensor& weight, WeightOperator instead);

/// As long as it exists, operators of this thread run as they are.
class PlainOperators : NoCopy {
 public:
  PlainOperators();
  ~PlainOperators();

 private:
  const bool before_;
};

/// From now on the parameter of a module is held in this form, and so are parameters of the model that are tied to it: `parameters()` lists
/// what is held, frozen, under its name, and the members keep dtype and sizes but no memory. Called before fully_shard, or within
/// deferred_init. Returns what is held.
at::Tensor hold_in_form(torch::nn::Module& model, const at::Tensor& weight, HeldForm form);

}  // namespace tessera
