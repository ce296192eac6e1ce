// What may stand in for a weight of a layer: a function in place of its operator, and another form in which it is held.
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

/// Asked wherever linear, a convolution, embedding or batch_norm is called with the weight, with the name of the operator and its arguments.
/// What torch::nn::Linear makes of its weight, a product with weight.t(), counts as aten::linear. Without a result the operator runs as it
/// is.
using WeightOperator = std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments)>;

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

/// The form of a weight, or of what is held for one. Null if it is an ordinary tensor.
const HeldForm* held_form(const at::Tensor& tensor);
/// What is held for a weight, or the weight itself if it is an ordinary tensor.
at::Tensor held_values(const at::Tensor& weight);
/// Whether operators of this weight are replaced, or its values are computed for each: then only an operator that applies the weight itself
/// does what is meant.
bool has_stand_in(const at::Tensor& weight);

}  // namespace tessera
