#include "tessera/shard/access/local_values.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_state.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_orphan(const std::string& name) {
  throw UsageError(fmt::format(
      "'{}' is a shard whose unsharded parameter no module holds any more, so its unit is gone and only this rank's part is left; keep the "
      "parameter in a member of its module",
      name));
}

/// "replicate 2 x shard 4"
std::string words_of(const Mesh& mesh) {
  std::vector<std::string> axes;
  for (const auto& [name, size] : mesh.axes()) axes.push_back(fmt::format("{} {}", name, size));
  return fmt::format("{}", fmt::join(axes, " x "));
}

}  // namespace

std::optional<Communicator> world_of(const torch::nn::Module& model) {
  const auto all = units(model);
  return all.empty() ? std::nullopt : std::optional(all.front()->mesh().world());
}

void expect_shards_current(Unit& unit) {
  const auto schedule = unit.schedule();
  const auto held = schedule->lock();
  if (!unit.state(held).allows_unsharded_writes()) return;
  throw UsageError(
      fmt::format("what full_params(module, Access::Write) lets a program write reaches the shards of unit '{}' only when it ends; save, "
                  "load and gather after that, or read the module's own members",
                  unit.name()));
}

bool LocalPart::is_unset() const {
  return unit->groups()[group].parameters[parameter].unset;
}

void LocalPart::note_values() const {
  unit->note_values(unit->groups()[group].parameters[parameter]);
}

bool has_values(const LocalValues& values) {
  return std::ranges::none_of(values.parts, &LocalPart::is_unset);
}

void expect_values(const LocalValues& values, std::string_view what) {
  std::vector<std::string> names;
  for (const auto& part : values.parts) {
    if (part.is_unset()) names.push_back(part.name);
  }
  for (const auto* tensors : {&values.outside, &values.buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      if (lacks_values(tensor)) names.push_back(name);
    }
  }
  if (names.empty()) return;
  throw UsageError(
      fmt::format("{} needs the values of {}, but nobody has loaded or initialised them; load weights, or for a module that is "
                  "not sharded call materialize",
                  what, some_of(names)));
}

void allocate_if_meta(const at::Tensor& tensor, c10::Device otherwise) {
  if (lacks_values(tensor)) allocate_values(tensor, otherwise);
}

LocalValues local_values(const torch::nn::Module& model) {
  LocalValues result{.units = units(model)};
  for (const auto& unit : result.units) {
    expect_shards_current(*unit);
    result.layouts.emplace(unit->layout_name());
    result.meshes.insert(words_of(unit->mesh()));
  }
  // Names come from the model rather than from the units, because a unit knows the whole model only if fully_shard was called on it.
  std::map<const void*, std::string> names;  // keyed by Unit::Parameter or, for parameters in no unit, by tensor
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    const auto found = locate(tensor);
    const auto* parameter = found.parameter;
    if (is_paged(tensor) && parameter == nullptr && !lacks_values(tensor)) refuse_orphan(item.key());
    if (parameter != nullptr && found.group->flat && parameter == &*found.group->flat) {
      // The module lists a flat shard in place of the group's parameters.
      const auto prefix = item.key().substr(0, item.key().size() - parameter->local_name.size());
      for (const auto& each : found.group->parameters) {
        names[&each] = prefix + each.local_name;
        for (const auto& other : each.other_names) result.aliases[prefix + other] = names[&each];
      }
      continue;
    }
    const void* const key = parameter != nullptr ? static_cast<const void*>(parameter) : tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = names.try_emplace(key, item.key());
    if (!is_new) {
      result.aliases[item.key()] = known->second;
    } else if (parameter == nullptr) {
      result.outside[item.key()] = lacks_values(tensor) ? tensor : tensor.detach();
    }
  }
  for (const auto& unit : result.units) {
    for (const auto& group : unit->groups()) {
      for (size_t i = 0; i < group.parameters.size(); i++) {
        const auto& parameter = group.parameters[i];
        const auto name = names.find(&parameter);
        result.parts.push_back({.name = name != names.end() ? name->second : parameter.name,
                                .shape = parameter.sizes,
                                .strides = parameter.strides,
                                .values = group.own.narrow(0, parameter.span.shard_offset, parameter.span.shard_numel),
                                .ranges = unit->ranges_of(parameter),
                                .shard = parameter.shard,
                                .offset = group.flat ? parameter.span.shard_offset : 0,
                                .unit = unit,
                                .group = unit->number_of(group),
                                .parameter = i});
      }
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) result.buffers[item.key()] = item.value();
  }
  return result;
}

}  // namespace tessera
