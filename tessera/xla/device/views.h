// Reads and writes strided tensors whose storage has a value of the graph in place of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// Returns the tensor's value in its shape. A CPU tensor must have one element, which becomes a number of the graph.
Value read(const at::Tensor& tensor);
/// Reinterprets a storage's value in the type of a view. If the types differ, the result is a list.
Value in_type(const Value& value, at::ScalarType element);
/// Puts a value of the tensor's shape, of any type, into the tensor's storage.
void write(const at::Tensor& tensor, Value value);

}  // namespace tessera::xla
