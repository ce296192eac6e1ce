#include "tessera/shard/fully_shard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/comm/groups/per_group.h"
#include "tessera/comm/joined_world.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/backward/unit_node.h"
#include "tessera/shard/deferred/recording.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/memory/unit_memory.h"
#include "tessera/shard/paging/paging.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/agreement.h"
#include "tessera/shard/unit/ignored_parameters.h"
#include "tessera/shard/unit/tables.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// Whether programs read the parameters of this container from the table of its parameters, so that the unsharded parameters have to stay
/// in this table.
bool reads_table_in_forward(const Module& module) {
  return dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

/// Returns the schedule that all units of a world share as long as they belong to no model. Thus the bound on unsharded units also holds
/// for units that never become part of a model.
std::shared_ptr<Schedule> schedule_before_model(const ShardOptions& options) {
  static PerGroup<Schedule> all;
  return all.get(options.mesh->world(),
                 [&] { return std::make_shared<Schedule>(ScheduleSettings(options, /*is_model=*/false, /*is_divided=*/false)); });
}

/// Where a parameter is registered.
struct Place {
  Module* module;
  std::string key;
};

/// The parameters of modules that belong to no unit yet.
struct Found {
  std::vector<ManagedParameter> managed;
  std::vector<std::vector<Place>> places;  // the places of each parameter; a tied parameter has several
  std::map<c10::TensorImpl*, size_t> known;
};

/// The parameters that a fully_shard call collects: those to be sharded, and those that every rank keeps whole, which form a second unit.
struct Collected {
  Found sharded, replicated;
};

/// Returns, in quotes, the full name of a parameter if its shard is registered in one of the modules, or else its name in its unit.
std::string name_of(const Located& place, std::span<Module* const> modules) {
  if (place.parameter == nullptr) return "a parameter";  // the tensor is a view of a parameter
  for (const auto* module : modules) {
    for (const auto& item : module->named_parameters()) {
      if (locate(item.value()).parameter == place.parameter) return "'" + item.key() + "'";
    }
  }
  return "'" + place.parameter->name + "'";
}

void collect(Module& module, const std::string& prefix, const ShardOptions& options, std::span<Module* const> modules,
             Collected& collected) {
  for (auto& entry : table_of(module)) {
    const auto& tensor = entry.value();
    const auto name = path_below(prefix, entry.key());
    if (!tensor.defined() || is_in(options.ignored, tensor) || is_in(options.left_out, tensor)) continue;
    if (const auto* tag = is_paged(tensor) ? tag_of(tensor) : nullptr) {
      const auto unit = tag->unit.lock();
      if (tag->role == Role::Unsharded && unit && !reads_table_in_forward(module)) {
        throw UsageError(
            "parameter '{}' is tied to one of unit '{}', {}, but lies outside of it; make one unit of the modules of both, "
            "fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{{...}}, options), or leave the parameter out of the inner unit, "
            "{{.left_out = {{...}}}}, so that the unit of a module that contains both takes it",
            name, unit->name(), name_of(locate(tensor), modules));
      }
      continue;
    }
    auto& found = is_in(options.replicated, tensor) ? collected.replicated : collected.sharded;
    const auto [position, is_new] = found.known.try_emplace(tensor.unsafeGetTensorImpl(), found.managed.size());
    if (is_new) {
      found.managed.push_back({.name = name, .tensor = tensor, .index = found.managed.size()});
      found.places.emplace_back();
    } else {
      found.managed[position->second].other_names.push_back(name);
    }
    found.places[position->second].push_back({.module = &module, .key = entry.key()});
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), path_below(prefix, child.key()), options, modules, collected);
  }
}

/// Makes the units below a module parts of one model: they get its schedule, and names that are paths in the model.
class Adoption {
 public:
  Adoption(std::shared_ptr<Schedule> schedule, const ShardOptions& options) : schedule_(std::move(schedule)), options_(options) {}

  void adopt(Module& module, const std::string& path) {
    for (auto& entry : table_of(module)) {
      const auto [unit, group, parameter] = locate(entry.value());
      if (parameter == nullptr) {
        if (entry.value().defined() && (is_in(options_.ignored, entry.value()) || find_ignored(entry.value())))
          remember_ignored(entry.value(), path_below(path, entry.key()), schedule_);
        continue;
      }
      if (named_.insert(parameter).second) parameter->name = path_below(path, entry.key());  // a tied parameter keeps its first name
      schedule_->take_over(*unit);
    }
    for (const auto& child : module.named_children()) {
      const auto below = path_below(path, child.key());
      for (const auto& unit : units_of(*child.value())) {
        const auto name = unit->name().ends_with(kReplicated) ? path_below(below, std::string(kReplicated)) : below;
        unit->rename(named_.insert(unit.get()).second ? name : unit->name() + "+" + name);
        LockedState(*unit)->reduction.forget_memory();
      }
      adopt(*child.value(), below);
    }
  }

 private:
  std::shared_ptr<Schedule> schedule_;
  const ShardOptions& options_;
  std::set<const void*> named_;  // units and parameters that have got their names
};

/// Throws UsageError if the module has parameters in a unit that was made from a larger module.
void expect_outer_is_last(Module& module) {
  std::set<std::shared_ptr<Unit>> inside;
  for (const auto& inner : module.modules(/*include_self=*/false)) std::ranges::move(units_of(*inner), std::inserter(inside, inside.end()));
  for (const auto& unit : units(module)) {
    if (inside.contains(unit)) continue;
    throw UsageError("module {} is sharded already, as a part of unit '{}'; shard inner modules first, and the modules that contain them last",
                     class_name(module), unit->name());
  }
}

/// `units`: whether any rank has units in the modules. `divided`: whether any such unit is on only a part of the ranks.
struct Below {
  bool units = false, divided = false;
};

/// Throws UsageError if an inner unit has more ranks than `world`. Collective.
Below what_is_below(std::span<Module* const> modules, const Communicator& world) {
  Below own;
  for (const auto* module : modules) {
    for (const auto& unit : units(*module)) {
      const auto& inner = unit->mesh().world();
      if (inner.size() > world.size()) {
        throw UsageError(
            "unit '{}' lies on {} ranks, but module {} that contains it would lie on {}; shard a module that "
            "contains units over all of their ranks",
            unit->name(), inner.size(), class_name(*module), world.size());
      }
      own.units = true;
      own.divided = own.divided || unit->schedule()->is_divided() || !same_ranks(inner, world);
    }
  }
  if (world.size() == 1) return own;
  const auto most = world.extremes(own.divided ? 2 : own.units ? 1 : 0, {.unit = "fully_shard"}).most;
  return {.units = most > 0, .divided = most > 1};
}

/// Puts the shards into the tables that `parameters()` reads. The modules' own members keep the unsharded parameters.
void register_shards(Unit& unit, const std::vector<std::vector<Place>>& places, Module& top) {
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) {
      for (const auto& [module, key] : places[parameter.index]) {
        if (reads_table_in_forward(*module)) continue;
        if (group.flat) {
          table_of(*module).erase(key);
        } else {
          table_of(*module)[key] = parameter.shard;
        }
      }
    }
    if (group.flat) table_of(top).insert(group.flat->name, group.flat->shard);
  }
}

/// Makes the schedule watch the module or, if no shared_ptr owns it, its children, which a shared_ptr always owns.
void watch(Schedule& schedule, const Module& module) {
  auto known = module.weak_from_this();
  if (!known.expired()) return schedule.watch(std::move(known));
  for (const auto& child : children_of(module)) schedule.watch(child.value());
}

/// Connects a new unit with its schedule, its reductions and autograd.
void begin_training(const std::shared_ptr<Unit>& unit, const std::shared_ptr<Schedule>& schedule) {
  schedule->add(*unit);
  const LockedState state(*unit);
  state->reduce_unsynced = &reduce_unsynced;
  state->set_reshard_after_forward(unit->options().reshard_after_forward);
  for (const auto& group : unit->groups()) group.own_storage().watch_raw_writes();
  attach_unit_node(unit);
}

void expect_valid(const ShardOptions& options) {
  const auto at_least_one = [](std::string_view name, int value) {
    if (value < 1) throw UsageError("ScheduleOptions::{} is {}, but must be at least 1", name, value);
  };
  at_least_one("max_live_units", options.schedule.max_live_units);
  at_least_one("prefetch_depth", options.schedule.prefetch_depth.value_or(1));
  const auto floating = [](std::string_view name, std::optional<at::ScalarType> dtype) {
    if (!dtype || at::isFloatingType(*dtype)) return;
    throw UsageError("MixedPrecision::{} is {}; give a floating-point dtype", name, c10::toString(*dtype));
  };
  const auto& precision = options.mixed_precision;
  floating("param_dtype", precision.param_dtype);
  floating("reduce_dtype", precision.reduce_dtype);
  floating("grad_dtype", precision.grad_dtype);
  floating("buffer_dtype", precision.buffer_dtype);
  floating("output_dtype", precision.output_dtype);
}

/// The options of the unit of replicated parameters: without those that say how parameters are sharded.
ShardOptions replicated(const ShardOptions& options) {
  const auto& world = options.mesh->world();
  auto result = options;
  result.mesh = Mesh(world, {.replicate = world.size(), .shard = 1});
  result.listing = Listing::ByName;
  result.layout = Layout::Auto;
  result.shard_dim = {};
  result.shard_size_multiple = 1;
  result.reshard_after_forward = {};
  return result;
}

/// If an option acts at calls of the modules, makes their units refuse operators outside of such calls. If all parameters are in inner
/// units, the inner units refuse. But they only warn inside a call of an inner module: the program may have called the inner module on
/// purpose, which looks the same as when a plain call of the outer module calls it.
void need_calls(std::span<Module* const> modules, const MixedPrecision& precision, const std::string& name) {
  if (!precision.output_dtype && !precision.cast_forward_inputs) return;
  NeededCall call{
      .modules = {modules.begin(), modules.end()}, .name = name, .option = precision.output_dtype ? "output_dtype" : "cast_forward_inputs"};
  auto own = units_of(*modules.front());
  if (own.empty()) {
    for (const auto* module : modules) {
      for (const auto& unit : units(*module)) {
        if (std::ranges::find(own, unit) == own.end()) own.push_back(unit);
      }
      for (const auto& inner : module->modules(/*include_self=*/false)) call.inner.push_back(inner.get());
    }
    call.is_said = std::make_shared<std::atomic<bool>>(false);
  }
  for (const auto& unit : own) unit->needed_calls().push_back(call);
}

/// Gives values to the tensors of a module that are not sharded: buffers and ignored parameters.
void materialize_rest(Module& module, const std::string& prefix, const ShardOptions& options) {
  if (std::ranges::none_of(module.buffers(), lacks_values) && std::ranges::none_of(options.ignored, lacks_values)) return;
  const c10::AutoGradMode no_grad(false);
  const auto device = options.mesh->world().traits().device;
  for_each_named(module, [&](const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name) {
    if (kind == DeferredStorage::Kind::Parameter && !is_in(options.ignored, tensor)) return;
    materialize(tensor, kind, path_below(prefix, name), options.param_init_fn, device);
  });
}

void shard(std::span<Module* const> modules, ShardOptions options) {
  const Calling calling("tessera::fully_shard");
  if (Recording::tape() != nullptr)
    throw UsageError("fully_shard was called inside deferred_init; call it with the module that deferred_init returns");
  install_paging();
  expect_valid(options);
  if (!options.mesh) options.mesh = joined_world();
  (void)options.mesh->shard();  // throws if the mesh has too many axes
  Collected collected;
  std::vector<std::string> names;
  const auto prefix = [&](size_t i) { return modules.size() == 1 ? "" : std::to_string(i); };
  for (size_t i = 0; i < modules.size(); i++) {
    if (!units_of(*modules[i]).empty()) throw UsageError("module {} is sharded already; remove the second call", class_name(*modules[i]));
    names.push_back(class_name(*modules[i]));
  }
  expect_named_once(modules, options);
  for (size_t i = 0; i < modules.size(); i++) collect(*modules[i], prefix(i), options, modules, collected);
  for (auto* module : modules) expect_outer_is_last(*module);
  const auto below = what_is_below(modules, options.mesh->world());
  if (options.listing == Listing::Flat && modules.size() > 1) {
    throw UsageError("a unit of several modules can't have Listing::Flat, because no module would own the vector; shard them one by one");
  }
  const auto name = fmt::format("{}", fmt::join(names, "+"));
  if (!collected.sharded.managed.empty() || !collected.replicated.managed.empty())
    expect_same_unit(name, collected.sharded.managed, collected.replicated.managed, options);
  // Buffers and ignored parameters get their values before anything is sharded, so that nothing is sharded if that fails. The ranks compare
  // whether it failed only if there is a param_init_fn, which may fail on some ranks. Recorded operators are the same on all ranks.
  const auto give_rest = [&] {
    for (size_t i = 0; i < modules.size(); i++) materialize_rest(*modules[i], prefix(i), options);
  };
  options.param_init_fn ? all_or_none(options.mesh->world(), {.unit = name}, "can't make its buffers", give_rest) : give_rest();
  // A module of several units is a model and gets a schedule of its own.
  const bool is_model = below.units || !collected.replicated.managed.empty();
  const auto schedule =
      is_model ? std::make_shared<Schedule>(ScheduleSettings(options, is_model, below.divided)) : schedule_before_model(options);
  const auto make_unit = [&](Found& found, const std::string& name, const ShardOptions& own) {
    const auto& shard_group = own.mesh->shard();
    expect_divisor(own.reshard_after_forward, shard_group.size());
    if (const int few = own.reshard_after_forward.ranks(shard_group.size()); few > 1 && few < shard_group.size())
      (void)consecutive_ranks(shard_group, few);  // makes the groups before the unit, because this may fail
    auto unit = Unit::make(name, std::move(found.managed), own);
    begin_training(unit, schedule);
    register_shards(*unit, found.places, *modules.front());
    for (auto* module : modules) remember_unit(*module, *unit);
    return unit;
  };
  std::shared_ptr<Unit> unit;
  if (!collected.sharded.managed.empty()) {
    unit = make_unit(collected.sharded, name, options);
    LockedState(*unit)->is_root = is_model;
  }
  if (!collected.replicated.managed.empty()) {
    make_unit(collected.replicated, path_below(name, std::string(kReplicated)), replicated(options));
  }
  need_calls(modules, options.mixed_precision, name);
  for (auto* module : modules) {
    watch(*schedule, *module);
    remember_sharded(*module, options, unit);
    if (const auto dtype = options.mixed_precision.buffer_dtype) cast_buffers(*module, *dtype, options.ignored);
  }
  Adoption adoption(schedule, options);
  for (size_t i = 0; i < modules.size(); i++) adoption.adopt(*modules[i], prefix(i));
  if (options.mesh->world().traits().traces && options.schedule.tracing.cuts_after_sharding) options.mesh->world().step_done();
}

}  // namespace

void fully_shard(const torch::jit::Module&, const ShardOptions&) {
  throw UsageError(
      "a TorchScript module can't be sharded: its interpreter holds the parameters itself; write it as a torch::nn module, load the weights "
      "from the script's file, and shard that module");
}

void fully_shard(ModuleRef module, const ShardOptions& options) {
  Module* const modules[] = {&*module};
  shard(modules, options);
}

void fully_shard(std::span<const std::shared_ptr<Module>> modules, const ShardOptions& options) {
  std::vector<Module*> pointers;
  if (modules.empty()) throw UsageError("fully_shard was given an empty list; a unit needs a module");
  for (const auto& module : modules) {
    pointers.push_back(&*ModuleRef(module));
  }
  shard(pointers, options);
}

}  // namespace tessera
