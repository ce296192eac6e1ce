#include "tessera/checkpoint/formats/torch/pickle.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

using pickle::Value;

constexpr std::string_view kModules = "__torch__.", kWrappers = "torch.jit._pickle.";  // beginnings of the names of libtorch's classes

// Includes the classes of quantized and sparse tensors, so that an error about such a tensor can give its name in the file.
constexpr std::string_view kObjects[] = {"torch.Tensor",
                                         "torch.nn.parameter.Parameter",
                                         "torch.nn.parameter.Buffer",
                                         "torch.storage.UntypedStorage",
                                         "torch.Size",
                                         "torch.device",
                                         "torch.serialization._get_layout",
                                         "builtins.set",
                                         "torch._tensor._rebuild_from_type_v2",
                                         "torch.per_tensor_affine",
                                         "torch.per_channel_affine",
                                         "torch.QInt8Storage",
                                         "torch.QUInt8Storage",
                                         "torch.QInt32Storage"};
constexpr std::string_view kRebuilt[] = {"tensor",  "tensor_v2",    "tensor_v3", "parameter", "parameter_with_state",
                                         "qtensor", "sparse_tensor"};

std::optional<nlohmann::json> items_to_json(const std::vector<Value>& items) {
  auto result = nlohmann::json::array();
  for (const auto& item : items) {
    auto json = to_json(item);
    if (!json) return std::nullopt;
    result.push_back(std::move(*json));
  }
  return result;
}

std::optional<nlohmann::json> dict_to_json(const pickle::Dict& dict) {
  auto result = nlohmann::json::object();
  for (const auto& [key, value] : dict.entries) {
    const auto name = to_name(key);
    auto json = to_json(value);
    if (!name || !json || !result.emplace(*name, std::move(*json)).second) return std::nullopt;
  }
  return result;
}

std::optional<nlohmann::json> object_to_json(const pickle::Object& object) {
  const auto& arguments = object.arguments;
  if (object.name.starts_with(kWrappers) && !arguments.empty()) return to_json(arguments[0]);
  if (!object.state.is_none()) return std::nullopt;
  if ((object.name == "torch.Size" || object.name == "builtins.set") && arguments.size() == 1) {
    return arguments[0].items() == nullptr ? std::nullopt : to_json(arguments[0]);
  }
  if (object.name != "torch.device" || arguments.empty() || arguments.size() > 2) return std::nullopt;
  const auto* const type = arguments[0].as<std::string>();
  const auto* const index = arguments.back().as<int64_t>();
  if (type == nullptr || (arguments.size() == 2 && index == nullptr)) return std::nullopt;
  return index == nullptr ? *type : *type + ":" + std::to_string(*index);
}

}  // namespace

std::string_view rebuilt_by(std::string_view global) {
  constexpr std::string_view kRebuild = "torch._utils._rebuild_";
  return global.starts_with(kRebuild) ? global.substr(kRebuild.size()) : std::string_view();
}

std::optional<pickle::Meaning> torch_globals(const std::string& name) {
  if (name == "collections.OrderedDict") return pickle::Meaning::Dict;
  if (name == "_codecs.encode" || name == "builtins.bytes") return pickle::Meaning::Encoded;
  if (name.starts_with(kModules) || name.starts_with(kWrappers)) return pickle::Meaning::Object;
  if (std::ranges::count(kObjects, name) > 0 || std::ranges::count(kRebuilt, rebuilt_by(name)) > 0 || torch_dtype_named(name) != nullptr ||
      torch_dtype_of_storage(name) != nullptr) {
    return pickle::Meaning::Object;
  }
  return std::nullopt;
}

std::optional<pickle::Meaning> any_globals(const std::string& name) {
  return torch_globals(name).value_or(pickle::Meaning::Object);
}

bool is_module(const Value& value) {
  const auto* const object = value.as<pickle::Object>();
  return object != nullptr && object->name.starts_with(kModules) && object->state.as<pickle::Dict>() != nullptr;
}

const Value& unwrapped(const Value& value) {
  const auto* const object = value.as<pickle::Object>();
  if (object == nullptr) return value;
  if (object->name.starts_with(kWrappers) && !object->arguments.empty()) return unwrapped(object->arguments[0]);
  return is_module(value) ? object->state : value;
}

std::optional<nlohmann::json> to_json(const Value& value) {
  if (value.is_none()) return nlohmann::json();
  if (const auto* const flag = value.as<bool>()) return *flag;
  if (const auto* const integer = value.as<int64_t>()) return *integer;
  if (const auto* const number = value.as<double>()) return *number;
  if (const auto* const text = value.as<std::string>()) return *text;
  if (const auto* const bytes = value.as<pickle::Bytes>()) {
    return nlohmann::json::binary(std::vector<uint8_t>(bytes->bytes.begin(), bytes->bytes.end()));
  }
  if (const auto* const items = value.items()) return items_to_json(*items);
  if (const auto* const dict = value.as<pickle::Dict>()) return dict_to_json(*dict);
  if (const auto* const object = value.as<pickle::Object>()) return object_to_json(*object);
  if (to_dtype(value)) return value.as<pickle::Global>()->name;
  return std::nullopt;
}

Value from_json(const nlohmann::json& json) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    throw UsageError("the number " + json.dump() + " is too large to be saved");
  }
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_binary()) return pickle::Bytes{std::string(json.get_binary().begin(), json.get_binary().end())};
  if (json.is_array()) {
    pickle::List list;
    for (const auto& item : json) list.items.push_back(from_json(item));
    return list;
  }
  pickle::Dict dict;
  for (const auto& [key, value] : json.items()) dict.entries.emplace_back(key, from_json(value));
  return dict;
}

std::optional<std::string> to_name(const Value& key) {
  if (const auto* const text = key.as<std::string>()) return *text;
  if (const auto* const integer = key.as<int64_t>()) return std::to_string(*integer);
  return std::nullopt;
}

std::optional<at::ScalarType> to_dtype(const Value& value) {
  const auto* const global = value.as<pickle::Global>();
  const auto* const dtype = global == nullptr ? nullptr : torch_dtype_named(global->name);
  return dtype == nullptr ? std::nullopt : std::optional(dtype->type);
}

std::optional<std::vector<int64_t>> to_integers(const Value& value) {
  if (const auto* const size = value.as<pickle::Object>()) {
    const bool sound = size->name == "torch.Size" && size->arguments.size() == 1 && value[0].as<pickle::Object>() == nullptr;
    return sound ? to_integers(value[0]) : std::nullopt;
  }
  if (value.items() == nullptr) return std::nullopt;
  std::vector<int64_t> result;
  for (const auto& item : *value.items()) {
    const auto* const integer = item.as<int64_t>();
    if (integer == nullptr) return std::nullopt;
    result.push_back(*integer);
  }
  return result;
}

}  // namespace tessera::checkpoint
