#include "tessera/shard/access/local_values.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_orphan(const std::string& name) {
  throw UsageError(
      "'{}' is a shard whose unsharded parameter no module holds any more, so its unit is gone and only this rank's part is left; keep the "
      "parameter in a member of its module",
      name);
}

const Unit::Parameter& parameter_of(const LocalPart& part) {
  return part.unit->groups()[part.group].parameters[part.parameter];
}

/// Returns the axes of the mesh in words, such as "replicate 2 x shard 4".
std::string words_of(const Mesh& mesh) {
  std::vector<std::string> axes;
  for (const auto& [name, size] : mesh.axes()) axes.push_back(fmt::format("{} {}", name, size));
  return fmt::format("{}", fmt::join(axes, " x "));
}

/// Whether some units of the model may be sharded over only a part of these ranks. Returns the same on all ranks.
bool is_divided(const LocalValues& model, const Communicator& world) {
  return std::ranges::any_of(model.units, [&](const auto& unit) {
    const auto& schedule = *unit->schedule();
    return schedule.is_divided() || !same_ranks(schedule.world(), world);
  });
}

constexpr Subject kNamesOfModel = {.unit = "names in the model"};

/// The names that the ranks of a divided model have.
struct NamesOfRanks {
  std::map<std::string, int> ranks;         // how many ranks have each name
  std::map<std::string, int64_t> values;    // how many values of a sharded parameter all ranks have together, counting one replica
  std::map<std::string, int64_t> expected;  // how many values the sharded parameter has
  std::set<std::string> outside;            // parameters in no unit
};

NamesOfRanks names_of_ranks(const LocalValues& model, const Communicator& world) {
  std::string own;
  for (const auto& part : model.parts) {
    int64_t here = 0;
    for (const auto& range : part.ranges) here += range.numel;
    if (!part.unit->mesh().replicate().is_first()) here = 0;
    own += fmt::format("{}\t{}\t{}\t0\n", part.name, here, c10::multiply_integers(part.shape));
  }
  for (const auto& [name, tensor] : model.outside) own += name + "\t0\t0\t1\n";
  for (const auto& [name, tensor] : model.buffers) own += name + "\t0\t0\t0\n";
  NamesOfRanks all;
  for (const auto& text : world.texts(own, kNamesOfModel)) {
    std::istringstream lines(text);
    int64_t here = 0, expected = 0, is_outside = 0;
    for (std::string name; std::getline(lines, name, '\t') && lines >> here >> expected >> is_outside && lines.ignore();) {
      all.ranks[name]++;
      all.values[name] += here;
      all.expected[name] = expected;
      if (is_outside != 0) all.outside.insert(name);
    }
  }
  return all;
}

}  // namespace

std::optional<Communicator> world_of(const torch::nn::Module& model) {
  const auto all = units(model);
  if (all.empty()) return std::nullopt;
  const auto& own = all.front()->mesh().world();
  const auto& schedule = *all.front()->schedule();
  if (!schedule.is_divided()) return own;
  // If all units of the module are on one part of the ranks, the world is these ranks, unless the module is the whole model.
  const bool together = std::ranges::all_of(all, [&](const auto& unit) { return same_ranks(unit->mesh().world(), own); });
  return together && schedule.member_outside(all) != nullptr ? own : schedule.world();
}

void expect_shards_current(Unit& unit) {
  if (!LockedState(unit)->allows_unsharded_writes()) return;
  throw UsageError(
      "a write inside full_params(module, Access::Write) reaches the shards of unit '{}' only when the guard is destroyed; save, "
      "load and gather after that, or read the module's own members",
      unit.name());
}

bool LocalPart::has_member() const {
  return !parameter_of(*this).unsharded.expired();
}

bool LocalPart::is_unset() const {
  return parameter_of(*this).unset;
}

void LocalPart::note_values() const {
  tessera::note_values(*unit, parameter_of(*this));
}

void trust_start(const LocalValues& values, c10::function_ref<bool(const LocalPart&)> is_loaded) {
  for (const auto& unit : values.units) {
    const auto loaded = std::ranges::count_if(values.parts, [&](const LocalPart& part) { return part.unit == unit && is_loaded(part); });
    if (loaded == std::ranges::distance(parameters_of(*unit))) LockedState(*unit)->trust_start();
  }
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
      "{} needs the values of {}, but nobody has loaded or initialised them; load weights, or for a module that is "
      "not sharded call materialize",
      what, some_of(names));
}

void allocate_if_meta(const at::Tensor& tensor, c10::Device otherwise) {
  if (lacks_values(tensor)) allocate_values(tensor, otherwise);
}

LocalValues local_values(const torch::nn::Module& model, const std::optional<std::string>& only) {
  LocalValues result{.units = units(model)};
  for (const auto& unit : result.units) {
    if (!only) expect_shards_current(*unit);
    result.layouts.emplace(unit->layout_name());
    result.meshes.insert(words_of(unit->mesh()));
  }
  // Takes names from the model and not from the units, because a unit knows names in the model only if fully_shard was called on the model.
  std::map<const void*, std::string> names;  // keyed by Unit::Parameter or, for parameters in no unit, by tensor
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    const auto found = locate(tensor);
    const auto* parameter = found.parameter;
    const bool is_checked = !only || item.key() == *only;
    // A paged tensor without a tag was never sharded: it is a weight whose operators are replaced.
    if (is_checked && is_paged(tensor) && parameter == nullptr && tag_of(tensor) != nullptr && !lacks_values(tensor))
      refuse_orphan(item.key());
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
      if (const auto* form = held_form(tensor)) result.forms[item.key()] = form;
      if (!tensor.requires_grad()) result.frozen.insert(item.key());
      result.outside[item.key()] = lacks_values(tensor) ? tensor : tensor.detach();
    }
  }
  for (const auto& unit : result.units) {
    for (const auto& group : unit->groups()) {
      for (size_t i = 0; i < group.parameters.size(); i++) {
        const auto& parameter = group.parameters[i];
        const auto name = names.find(&parameter);
        if (name == names.end()) continue;  // the parameter belongs to another part of the model
        if (const auto* form = held_form(parameter.unsharded.lock())) result.forms[name->second] = form;
        if (!parameter.shard.requires_grad()) result.frozen.insert(name->second);
        result.parts.push_back({.name = name->second,
                                .shape = parameter.sizes,
                                .strides = parameter.strides,
                                .values = parameter.in_chunk(group.own),
                                .ranges = parameter.ranges,
                                .shard = parameter.shard,
                                .offset = group.flat ? parameter.span.shard_offset : 0,
                                .unit = unit,
                                .group = group.number,
                                .parameter = i});
      }
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) result.buffers[item.key()] = item.value();
  }
  return result;
}

void gather_like(const LocalValues& model, c10::function_ref<at::Tensor(const LocalPart& part)> own,
                 c10::function_ref<void(const LocalPart& part, const at::Tensor& whole)> visit) {
  auto next = model.parts.begin();  // `parts` has the order of the units and their parameters
  for (const auto& unit : model.units) {
    for (const auto& group : unit->groups()) {
      at::Tensor flat;
      std::vector<const LocalPart*> parts;
      for (; next != model.parts.end() && next->unit == unit && next->group == group.number; next++) {
        const auto values = own(*next);
        if (!values.defined()) continue;
        parts.push_back(&*next);
        if (!flat.defined()) flat = at::zeros({group.chunk}, values.options());
        parameter_of(*next).in_chunk(flat).copy_(values);
      }
      if (parts.empty()) continue;
      const auto all = LockedState(*unit)->gathered(group, flat);
      for (const auto* part : parts) visit(*part, parameter_of(*part).in(all));
    }
  }
}

std::set<std::string> names_elsewhere(const LocalValues& model, const Communicator& world) {
  std::set<std::string> names;
  if (!is_divided(model, world)) return names;
  for (const auto& [name, ranks] : names_of_ranks(model, world).ranks) names.insert(name);
  for (const auto& part : model.parts) names.erase(part.name);
  for (const auto& [name, tensor] : model.outside) names.erase(name);
  for (const auto& [name, tensor] : model.buffers) names.erase(name);
  return names;
}

namespace {

/// The checks of expect_one_value_each. Returns the names that the ranks of a divided model have.
std::optional<NamesOfRanks> names_of_one_value_each(const LocalValues& model, const Communicator& world, std::string_view what) {
  std::optional<NamesOfRanks> all;
  if (is_divided(model, world)) {
    all = names_of_ranks(model, world);
    std::vector<std::string> several, partly_outside;
    for (const auto& [name, values] : all->values) {
      if (values > all->expected.at(name)) several.push_back(name);
      if (all->outside.contains(name) && all->ranks.at(name) < world.size()) partly_outside.push_back(name);
    }
    if (!partly_outside.empty()) {
      throw UsageError(
          "{} would leave out parameters that are in no unit and that only some of the ranks have: {}. Name them in "
          "ShardOptions::replicated of the fully_shard call for their part of the ranks",
          what, some_of(partly_outside));
    }
    if (!several.empty()) {
      throw UsageError(
          "{} would keep one of several parameters of the same name: {}. Their unit is on a part of the ranks, and each such "
          "part trains parameters of its own. Register their module under another name on each part (\"expert_0\", \"expert_1\"), save "
          "it by itself with the communicator of its mesh, or, if the parameters should be equal, shard the module over a mesh of all "
          "ranks that replicates it",
          what, some_of(several));
    }
  }
  if (!world.traits().can_differ()) return all;
  std::string lines;
  for (const auto& [name, tensor] : model.outside) {
    const auto dense = tensor.is_sparse() ? tensor.to_dense() : tensor;
    const auto hash = lacks_values(tensor) ? 0 : fingerprint(dense.contiguous().view({-1}));
    lines += fmt::format("'{}'\tvalues #{:x}\n", name, hash);
  }
  if (const auto different = difference_on_ranks(world, lines, {.unit = "parameters in no unit"}); !different.empty()) {
    throw DisagreementError(
        "{} would keep rank 0's values of a parameter that is in no unit and has drifted apart: the ranks train it with "
        "different gradients. Average its gradients by tessera::average_gradients(parameters, world) after backward, or name it in "
        "ShardOptions::replicated. {}",
        what, different);
  }
  return all;
}

}  // namespace

void expect_one_value_each(const LocalValues& model, const Communicator& world, std::string_view what) {
  (void)names_of_one_value_each(model, world, what);
}

void expect_all_on_each(const LocalValues& model, const Communicator& world, std::string_view what) {
  const auto all = names_of_one_value_each(model, world, what);
  if (!all) return;
  std::vector<std::string> missing;
  for (const auto& [name, ranks] : all->ranks) {
    if (ranks < world.size()) missing.push_back(name);
  }
  if (missing.empty()) return;
  throw UsageError(
      "{} would leave out what only some of the ranks have: {}. checkpoint::save keeps all of it, and tessera ckpt consolidate "
      "makes one file of such a checkpoint",
      what, some_of(missing));
}

}  // namespace tessera
