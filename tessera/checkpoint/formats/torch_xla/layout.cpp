#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/formats/torch_xla/rank.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

namespace xla = torch_xla;
using pickle::Dict;
using pickle::Value;

bool is_in(const std::string& name, const std::string& module) {
  return module.empty() || (name.starts_with(module) && name.size() > module.size() && name[module.size()] == '.');
}

/// The innermost module that is wrapped and has the parameter.
std::optional<std::string> unit_of(const std::string& name, const std::vector<std::string>& units) {
  std::optional<std::string> result;
  for (const auto& unit : units) {
    if (is_in(name, unit) && (!result || unit.size() >= result->size())) result = unit;
  }
  return result;
}

std::string rest_of(const std::string& name, const std::string& module) {
  return module.empty() ? name : name.substr(module.size() + 1);
}

void expect_one_dtype(const Catalog& model, const std::vector<TorchXlaShard::Part>& parts) {
  const auto dtype = [&](const TorchXlaShard::Part& part) { return model.tensors.at(part.name).dtype; };
  for (const auto& part : parts) {
    if (dtype(part) == dtype(parts.front())) continue;
    throw UsageError("'{}' is {} and '{}' is {}, so one flat parameter can't hold both; write with flatten_parameters = false",
                     parts.front().name, c10::toString(dtype(parts.front())), part.name, c10::toString(dtype(part)));
  }
}

int64_t numel_of(const std::vector<TorchXlaShard::Part>& parts) {
  int64_t sum = 0;
  for (const auto& part : parts) sum += c10::multiply_integers(part.shape);
  return sum;
}

int64_t multiple_of(const TorchXlaOptions& options) {
  return options.shard_param_on_dim_0 ? 1 : options.shard_size_multiple;
}

/// What is trained becomes one flat parameter, and what is frozen another one.
void add_flat(std::vector<TorchXlaShard>& layout, const Catalog& model, const std::string& module, std::vector<TorchXlaShard::Part> parts,
              const TorchXlaOptions& options) {
  const auto is_trained = [&](const TorchXlaShard::Part& part) { return !options.frozen.contains(part.name); };
  const auto frozen = std::ranges::stable_partition(parts, is_trained);
  int number = 0;
  for (std::vector<TorchXlaShard::Part> own : {std::vector(parts.begin(), frozen.begin()), std::vector(frozen.begin(), parts.end())}) {
    if (own.empty()) continue;
    expect_one_dtype(model, own);
    const auto numel = numel_of(own);
    layout.push_back({.module = module,
                      .original_name = fmt::format("{}{}{}", xla::kWrapped, xla::kFlatParameter, number++),
                      .shape = {numel},
                      .parts = std::move(own),
                      .size_multiple = multiple_of(options)});
  }
}

std::vector<std::string> divided_parameters(const Catalog& model, const TorchXlaOptions& options) {
  auto names = options.parameters;
  for (const auto& name : names) {
    if (!model.tensors.contains(name)) throw UsageError("the parameter '{}' of TorchXlaOptions is not in the checkpoint", name);
  }
  if (!names.empty()) return names;
  for (const auto& [name, tensor] : model.tensors) {
    if (!model.buffers.contains(name)) names.push_back(name);
  }
  return names;
}

/// The units with parameters in the order in which a model lists them: each before those inside of it.
void list_units(const std::optional<std::string>& outer, const std::vector<std::string>& units, std::vector<std::string>& result) {
  for (const auto& unit : units) {
    auto others = units;
    std::erase(others, unit);
    if (unit_of(unit, others) != outer) continue;
    result.push_back(unit);
    list_units(unit, units, result);
  }
}

/// Reads shard_info and flatten_info.
class LayoutReader {
 public:
  explicit LayoutReader(const xla::RankContent& file) : file_(file) {}

  std::vector<TorchXlaShard> read() const {
    std::vector<TorchXlaShard> shards;
    for (const auto& [module, own] : file_.dict(file_.metadata(), "shard_info").entries) {
      const auto name = to_name(module);
      if (!name || own.as<Dict>() == nullptr) file_.fail("has a shard_info that makes no sense");
      for (const auto& [key, place] : own.as<Dict>()->entries) shards.push_back(shard(*name, key, place));
    }
    return shards;
  }

 private:
  TorchXlaShard shard(const std::string& module, const Value& key, const Value& place) const {
    const auto* const own = place.as<Dict>();
    const auto* const original = own == nullptr ? nullptr : own->find("_orig_name");
    const auto* const size = own == nullptr ? nullptr : own->find("_orig_size");
    const auto name = to_name(key);
    const auto shape = size == nullptr ? std::nullopt : to_integers(*size);
    if (!name || original == nullptr || original->as<std::string>() == nullptr || !shape || !checked_numel(*shape, kWidest)) {
      file_.fail(fmt::format("has a shard_info that does not say name and size of '{}'", name.value_or("")));
    }
    TorchXlaShard result{.module = module, .original_name = *original->as<std::string>(), .shape = *shape};
    if (result.name() != *name) file_.fail(fmt::format("has a shard_info in which '{}' is said to be '{}'", *name, result.original_name));
    const auto full = xla::full_name(module, result.original_name);
    if (full.find(std::string(xla::kWrapped) + std::string(xla::kFlatParameter)) == std::string::npos) {
      result.parts = {{.name = xla::without_wrappers(full), .original_name = result.original_name, .shape = *shape}};
    } else {
      result.parts = parts(full, *checked_numel(*shape));
    }
    return result;
  }

  /// Of a flat parameter: from (names, shapes, numbers of values).
  std::vector<TorchXlaShard::Part> parts(const std::string& flat, int64_t numel) const {
    const auto* const found = file_.dict(file_.metadata(), "flatten_info").find(flat);
    const auto json = found == nullptr ? std::nullopt : to_json(*found);
    const auto refuse = [&] { file_.fail(fmt::format("has a flatten_info that does not fit '{}'", flat)); };
    if (!json || !json->is_array() || json->size() != 3) refuse();
    std::vector<TorchXlaShard::Part> result;
    try {
      const auto names = json->at(0).get<std::vector<std::string>>();
      const auto shapes = json->at(1).get<std::vector<std::vector<int64_t>>>();
      const auto numels = json->at(2).get<std::vector<int64_t>>();
      if (shapes.size() != names.size() || numels.size() != names.size()) refuse();
      for (size_t i = 0; i < names.size(); i++) {
        const auto own = checked_numel(shapes[i], kWidest);
        if (!own || *own / kWidest != numels[i] || numels[i] > numel) refuse();
        numel -= numels[i];
        const auto dot = flat.rfind('.');
        const auto wrapper = dot == std::string::npos ? "" : flat.substr(0, dot);
        result.push_back({.name = xla::without_wrappers(xla::full_name(wrapper, names[i])), .original_name = names[i], .shape = shapes[i]});
      }
    } catch (const nlohmann::json::exception&) {
      refuse();
    }
    if (numel != 0 || result.empty()) refuse();
    return result;
  }

  static constexpr int64_t kWidest = 16;  // bytes in a value: sizes in bytes must not overflow either
  const xla::RankContent& file_;
};

}  // namespace

std::vector<TorchXlaShard> torch_xla::layout_of(const RankContent& file) {
  return LayoutReader(file).read();
}

std::string torch_xla::name_in_state(const std::string& name, const std::vector<std::string>& units) {
  std::string result;
  for (size_t end = 0; end != std::string::npos;) {
    const auto module = name.substr(0, end == 0 ? 0 : end - 1);
    if (std::ranges::find(units, module) != units.end()) result += kWrapped;
    const auto dot = name.find('.', end);
    result += name.substr(end, dot == std::string::npos ? dot : dot + 1 - end);
    end = dot == std::string::npos ? dot : dot + 1;
  }
  return result;
}

std::string TorchXlaShard::name() const {
  return xla::replace_all(fmt::format("{}.{}", xla::kShard, original_name), ".", xla::kSeparator);
}

std::string TorchXlaShard::state_name() const {
  return xla::full_name(module, name());
}

std::vector<TorchXlaShard> torch_xla_layout(const Catalog& model, const TorchXlaOptions& options) {
  if (options.shard_size_multiple < 1) throw UsageError("shards can't be multiples of {} values", options.shard_size_multiple);
  std::map<std::string, std::vector<TorchXlaShard::Part>> parts;  // by unit
  std::vector<std::string> units, order;
  for (const auto& name : divided_parameters(model, options)) {
    const auto unit = unit_of(name, options.units);
    if (!unit) continue;  // it is not divided
    if (!parts.contains(*unit)) units.push_back(*unit);
    parts[*unit].push_back(
        {.name = name, .original_name = std::string(xla::kFlattened) + rest_of(name, *unit), .shape = model.tensors.at(name).shape});
  }
  list_units({}, units, order);
  std::vector<TorchXlaShard> layout;
  for (const auto& unit : order) {
    const auto module = unit.empty() ? "" : xla::name_in_state(unit, options.units);
    auto& own = parts[unit];
    if (options.flatten_parameters) {
      add_flat(layout, model, module, std::move(own), options);
      continue;
    }
    for (auto& part : own) {
      part.original_name.insert(0, xla::kWrapped);
      layout.push_back({.module = module,
                        .original_name = part.original_name,
                        .shape = part.shape,
                        .parts = {part},
                        .on_dim_0 = options.shard_param_on_dim_0 && !part.shape.empty(),
                        .size_multiple = multiple_of(options)});
    }
  }
  return layout;
}

}  // namespace tessera::checkpoint
