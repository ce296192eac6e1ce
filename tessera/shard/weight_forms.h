// Replacements for a weight of a layer: a function that runs in place of its operators (WeightOperator), and another form in which the
// weight is stored (HeldForm).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Called in place of linear, convolutions, embedding and batch_norm on the weight, with the name and the arguments of the operator. The
/// product with weight.t() that torch::nn::Linear computes counts as aten::linear. If it returns nothing, the operator itself runs.
using WeightOperator = std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments)>;

/// A form in which a frozen weight is stored, such as NF4: a tensor from which the weight's values are computed for each operator that uses
/// them.
struct HeldForm {
  std::string name;            // "nf4"
  std::vector<int64_t> sizes;  // the sizes of the weight
  at::ScalarType dtype;
  /// Returns the held tensor for all values of a weight. Both tensors may be deferred (deferred_init).
  std::function<at::Tensor(const at::Tensor& values)> encode;
  std::function<at::Tensor(const at::Tensor& held, at::ScalarType dtype)> decode;
  /// Runs an operator with `held` in place of the weight, without decoding all values at once or keeping them for backward. Returns nothing
  /// for operators that it does not support.
  std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments, const at::Tensor& held)> instead;
};

/// Returns the form of a weight, or of the tensor that is stored for a weight. Null for an ordinary tensor.
const HeldForm* held_form(const at::Tensor& tensor);
/// Returns the tensor that is stored for a weight, or the weight itself if it is an ordinary tensor.
at::Tensor held_values(const at::Tensor& weight);
/// Whether operators of this weight are replaced, or its values are computed for each operator. Then only operators that apply the weight
/// itself give the right result.
bool has_stand_in(const at::Tensor& weight);

}  // namespace tessera
