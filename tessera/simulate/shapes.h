// The shapes of results of operators for which libtorch has no kernel on its meta device.
#pragma once

#include <ATen/core/ivalue.h>

#include <string_view>
#include <vector>

namespace tessera::simulate {

using Results = std::vector<c10::IValue>;
/// Returns an operator's results, with memory but without values.
using ShapeRule = Results (*)(c10::ArrayRef<c10::IValue> operands);
/// Null if libtorch's own kernel serves, or if there is no rule.
ShapeRule shape_rule(std::string_view name);

}  // namespace tessera::simulate
