// Reads the parts of torch.save's pickles: dtypes, shapes and names. Converts plain values to JSON and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/checkpoint/formats/dtype_names.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"

namespace tessera::checkpoint {

/// Returns "tensor_v2" for "torch._utils._rebuild_tensor_v2", and likewise for the other functions of torch that rebuild values. Empty for
/// other globals.
std::string_view rebuilt_by(std::string_view global);
/// Accepts only the globals of tensors and plain values.
std::optional<pickle::Meaning> torch_globals(const std::string& name);
/// Accepts all globals, for files with values of any class: nothing is called, so knowing their names does no harm.
std::optional<pickle::Meaning> any_globals(const std::string& name);

/// Removes libtorch's wrappers. Returns the dict or list inside a value that libtorch has annotated with types, the attributes of a module
/// that torch::save has written, and any other value as it is.
const pickle::Value& unwrapped(const pickle::Value& value);
/// Whether the value, unwrapped or not, is a module of libtorch, or of TorchScript.
bool is_module(const pickle::Value& value);

/// The reason in Catalog::left_out for a value that to_json() can't convert.
inline constexpr auto kNoPlainData = "it is not plain data, but of a class of Python";
/// Converts numbers, texts, bytes, lists, tuples, dicts, and objects that hold one of these, such as torch.Size. Returns nothing for other
/// values, and for a dict that has a key twice or a key that is neither a text nor an integer.
std::optional<nlohmann::json> to_json(const pickle::Value& value);
/// Throws UsageError for an integer of more than 63 bits.
pickle::Value from_json(const nlohmann::json& json);

/// The key of a dict as a part of a name, or nothing if it is neither a text nor an integer.
std::optional<std::string> to_name(const pickle::Value& key);

/// The dtype that a global such as torch.float32 names, or nothing for other values.
std::optional<at::ScalarType> to_dtype(const pickle::Value& value);

/// The integers of a list, a tuple or a torch.Size, or nothing for other values.
std::optional<std::vector<int64_t>> to_integers(const pickle::Value& value);

}  // namespace tessera::checkpoint
