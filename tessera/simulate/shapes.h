// The shapes of results of operators for which libtorch has no kernel on its meta device.
#pragma once

#include <ATen/core/ivalue.h>

#include <string_view>
#include <vector>

namespace tessera::simulate {

using Operands = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
/// Returns an operator's results, with memory but without values.
using ShapeRule = Results (*)(Operands in);
/// Null if libtorch's own kernel serves, or if there is no rule.
ShapeRule shape_rule(std::string_view name);

/// The sizes of the result of a convolution. `options`: stride, padding, dilation, whether it is transposed, output padding and groups.
std::vector<int64_t> convolved_sizes(const at::Tensor& x, const at::Tensor& weight, Operands options);

}  // namespace tessera::simulate
