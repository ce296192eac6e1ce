// What runs in place of the operator by which a layer of libtorch applies its weight: the layer's own forward can't be replaced.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/no_copy.h"

namespace torch::nn {
class Module;
}

namespace tessera {

/// Asked wherever linear, a convolution, embedding or batch_norm is called with the weight, with the name of the operator and its arguments.
/// What torch::nn::Linear makes of its weight, a product with weight.t(), counts as aten::linear. Without a result the operator runs as it
/// is.
using WeightOperator = std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments)>;

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

/// A form in which a frozen weight is held: a tensor from which its values are computed for each operator that uses them.
struct HeldForm {
  std::string name;            // "nf4"
  std::vector<int64_t> sizes;  // of the weight
  at::ScalarType dtype;
  /// What is held, of all values of a weight; the two may be deferred.
  std::function<at::Tensor(const at::Tensor& values)> encode;
  std::function<at::Tensor(const at::Tensor& held, at::ScalarType dtype)> decode;
  /// In place of operators that need not have all values at once, or need not keep them for backward. Its weight is what is held.
  std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments, const at::Tensor& held)> instead;
};

/// From now on the parameter of a module is held in this form, and so are parameters of the model that are tied to it: `parameters()` lists
/// what is held, frozen, under its name, and the members keep dtype and sizes but no memory. Called before fully_shard, or within
/// deferred_init. Returns what is held.
at::Tensor hold_in_form(torch::nn::Module& model, const at::Tensor& weight, HeldForm form);

/// The form of a weight, or of what is held for one. Null if it is an ordinary tensor.
const HeldForm* held_form(const at::Tensor& tensor);

}  // namespace tessera
