// Replaces the operator by which a layer of libtorch applies its weight, because the layer's own forward can't be replaced.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/base/no_copy.h"
#include "tessera/shard/weight_forms.h"

namespace torch::nn {
class Module;
}

namespace tessera {

/// Runs `instead` in place of the operators of the weight, and replaces a function that was set before. The weight may be sharded before or
/// after this call, or not at all. An empty function restores the operators.
void replace_weight_operator(const at::Tensor& weight, WeightOperator instead);

/// As long as it exists, operators of this thread are not replaced.
class PlainOperators : NoCopy {
 public:
  PlainOperators();
  ~PlainOperators();

 private:
  const bool before_;
};

/// Holds a parameter, and parameters of the model that are tied to it, in this form: `parameters()` lists the held tensor, frozen, under
/// the parameter's name, and the members keep dtype and sizes but no memory. Call it before fully_shard, or within deferred_init. Returns
/// the held tensor.
at::Tensor hold_in_form(torch::nn::Module& model, const at::Tensor& weight, HeldForm form);

}  // namespace tessera
