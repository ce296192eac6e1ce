// The state of optimizers as state dicts.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/dict_source.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kStateLoadFailed = "can't load its optimizer state; nothing was changed";

struct OptimizerCall : OuterCall {
  OptimizerCall(std::string_view function, const OptimizerRef& optimizer) : OuterCall(function) {
    if (!optimizer) throw UsageError("the state dict of an optimizer needs an optimizer, and was given a null pointer");
  }
};

/// Returns the names of parameters by the identity of their shards, which optimizers know.
std::map<const void*, std::string> names_of_shards(const torch::nn::Module& model) {
  std::map<const void*, std::string> names;
  for (const auto& [name, parameter] : named_parameters(model)) names[parameter.unsafeGetTensorImpl()] = name;
  return names;
}

/// The optimizer state of one rank, and the shards that it belongs to.
struct OwnState {
  OwnState(const OptimizerRef& optimizer, const torch::nn::Module& model)
      : values(local_values(model)), names(names_of_shards(model)), state(optimizer.state(model)) {
    for (const auto& part : values.parts) expect_whole(part);
  }

  /// The tensor of a shard's state by this key; undefined if there is none.
  at::Tensor find(const std::string& name, const std::string& key) const {
    const auto own = state.find(name);
    if (own == state.end()) return {};
    const auto tensor = own->second.find(key);
    return tensor == own->second.end() ? at::Tensor() : tensor->second;
  }
  /// Empty if the shard is in the unit, but not in this module.
  std::string name_of(const LocalPart& part) const {
    const auto name = names.find(part.shard.unsafeGetTensorImpl());
    return name == names.end() ? std::string() : name->second;
  }

  void expect_whole(const LocalPart& part) const {
    const auto own = state.find(name_of(part));
    if (own == state.end()) return;
    for (const auto& [key, tensor] : own->second) {
      if (tensor.dim() == 0 || tensor.sizes() == part.shard.sizes()) continue;
      throw UsageError(
          "the state '{}' of '{}' has one value for each block of values, and so no form like the parameter; checkpoint::save keeps "
          "it as it is",
          key, own->first);
    }
  }

  /// Names, keys and dtypes, which must be the same on all ranks, so that they gather the same.
  std::string description() const {
    std::string text;
    for (const auto& [name, own] : state) {
      for (const auto& [key, tensor] : own) text += fmt::format("{}\n{}\n{}\n", name, key, static_cast<int>(tensor.scalar_type()));
    }
    return text;
  }

  LocalValues values;
  std::map<const void*, std::string> names;
  std::map<std::string, optim::ParameterState> state;
};

/// Turns the tensors of a dict into the state of this rank's shards.
class StateLoader {
 public:
  /// Throws UsageError if the dict does not fit.
  StateLoader(const Catalog& there, LocalValues values, const torch::nn::Module& model, const std::set<std::string>& elsewhere,
              const std::vector<std::string>& may_be_unknown)
      : values_(std::move(values)), names_(names_of_shards(model)) {
    std::map<std::string, Target> targets;
    for (const auto& part : values_.parts) {
      if (names_.contains(part.shard.unsafeGetTensorImpl())) targets[part.name] = {.part = &part, .shape = part.shape};
    }
    for (const auto& [name, tensor] : values_.outside) targets[name] = {.name = name, .shape = tensor.sizes().vec()};
    for (const auto& [alias, first] : values_.aliases) {
      if (const auto known = targets.find(first); known != targets.end()) targets[alias] = known->second;
    }
    std::set<std::string> unknown;
    std::vector<std::string> misfits;
    std::set<std::pair<std::string, std::string>> taken;  // a tied parameter may be there under several names
    for (const auto& [entry, tensor] : there.tensors) {
      const auto [name, key] = split(entry);
      const auto known = targets.find(name);
      if (known == targets.end()) {
        if (!elsewhere.contains(name) && !matches(name, may_be_unknown)) unknown.insert(name);
        continue;
      }
      const auto& target = known->second;
      const bool is_number = tensor.shape.empty() && (!target.shape.empty() || key.starts_with("step"));
      if (!is_number && tensor.shape != target.shape) {
        misfits.push_back(fmt::format("'{}' of '{}' is of [{}] there, but of [{}] in the model", key, name, fmt::join(tensor.shape, ", "),
                                      fmt::join(target.shape, ", ")));
      }
      if (!taken.emplace(target.part != nullptr ? target.part->name : target.name, key).second) continue;
      items_.push_back({.entry = entry, .key = key, .target = target, .dtype = tensor.dtype, .is_number = is_number});
    }
    expect_whole_shards(misfits);
    std::vector<std::string> faults;
    if (!unknown.empty()) faults.push_back("the model has no " + some_of({unknown.begin(), unknown.end()}));
    if (!unknown.empty()) faults.emplace_back("what may differ can be named in may_be_unknown of the options");
    faults.insert(faults.end(), misfits.begin(), misfits.begin() + std::min<std::ptrdiff_t>(std::ssize(misfits), 5));
    if (!faults.empty()) throw UsageError("the state dict is of another optimizer: {}", joined(faults, "; "));
  }

  /// Throws UsageError if the source lacks values that this rank needs.
  void expect_parts(const ValueSource& source) const {
    for (const auto& item : items_) {
      const bool whole = item.is_number || item.target.part == nullptr;
      source.expect_parts(item.entry, whole ? std::vector{whole_record(shape_of(item))} : records_of(*item.target.part));
    }
  }

  /// Reads the state in the form that OptimizerRef::load_state takes. Collective.
  std::map<std::string, optim::ParameterState> read(ValueSource& source, const Communicator& world) const {
    std::map<std::string, optim::ParameterState> result;
    for (const auto& item : items_) {
      source.open(item.entry);
      auto& tensor = result[name_of(item.target)][item.key];
      if (item.is_number || item.target.part == nullptr) {
        tensor = read_whole(source, item, world);
      } else {
        add_part(tensor, *item.target.part, read_part(source, item, world));
      }
    }
    return result;
  }

 private:
  /// A part of a shard, or a parameter in no unit.
  struct Target {
    const LocalPart* part = nullptr;
    std::string name = {};
    std::vector<int64_t> shape = {};
  };
  struct Item {
    std::string entry, key;
    Target target;
    at::ScalarType dtype;
    bool is_number;
  };

  static std::pair<std::string, std::string> split(const std::string& entry) {
    const auto dot = entry.rfind('.');
    return {entry.substr(0, dot), entry.substr(dot + 1)};
  }

  const std::string& name_of(const Target& target) const {
    return target.part != nullptr ? names_.at(target.part->shard.unsafeGetTensorImpl()) : target.name;
  }

  /// A shard of several parameters (Listing::Flat) has state for all of them or for none.
  void expect_whole_shards(std::vector<std::string>& misfits) const {
    std::map<std::pair<const void*, std::string>, size_t> counts;
    for (const auto& item : items_) {
      if (item.target.part != nullptr) counts[{item.target.part->shard.unsafeGetTensorImpl(), item.key}]++;
    }
    for (const auto& [place, count] : counts) {
      const auto in_shard = std::ranges::count_if(
          values_.parts, [&shard = place.first](const LocalPart& part) { return part.shard.unsafeGetTensorImpl() == shard; });
      if (std::cmp_equal(in_shard, count)) continue;
      misfits.push_back(
          fmt::format("it has '{}' of {} of the {} parameters in '{}'", place.second, count, in_shard, names_.at(place.first)));
    }
  }

  static std::vector<int64_t> shape_of(const Item& item) { return item.is_number ? std::vector<int64_t>() : item.target.shape; }

  static at::Tensor read_whole(const ValueSource& source, const Item& item, const Communicator& world) {
    const auto shape = shape_of(item);
    const auto values = at::empty(shape, at::TensorOptions(at::kCPU).dtype(item.dtype));
    source.read(item.entry, whole_record(shape), values.view({-1}), world.local_ranks().front());
    return values;
  }

  static at::Tensor read_part(const ValueSource& source, const Item& item, const Communicator& world) {
    const auto& part = *item.target.part;
    const auto records = records_of(part);
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < records.size(); i++) {
      values.push_back(at::empty({records[i].numel()}, at::TensorOptions(at::kCPU).dtype(item.dtype)));
      source.read(item.entry, records[i], values.back(), world.local_ranks()[i]);
    }
    return tensor_of_ranks(std::move(values), part.values, records, world);
  }

  /// Puts the flat values of a part into the state of its shard, which is undefined at first.
  static void add_part(at::Tensor& state, const LocalPart& part, const at::Tensor& values) {
    if (!state.defined()) state = at::zeros(part.shard.sizes(), values.options());
    state.view({-1}).narrow(0, part.offset, part.values.numel()).copy_(values);
  }

  LocalValues values_;
  std::map<const void*, std::string> names_;
  std::vector<Item> items_;
};

/// Flattens a dict to entries PARAMETER.KEY, which StateLoader splits again.
template <class T>
std::map<std::string, T> flattened(const std::map<std::string, std::map<std::string, T>>& dict) {
  std::map<std::string, T> flat;
  for (const auto& [name, state] : dict) {
    for (const auto& [key, tensor] : state) flat[fmt::format("{}.{}", name, key)] = tensor;
  }
  return flat;
}

template <class Dict>
void load_optimizer(std::string_view function, const OptimizerRef& optimizer, const torch::nn::Module& model, const Dict& dict,
                    const LoadStateDictOptions& options) {
  const OptimizerCall call(function, optimizer);
  const auto world = world_for(model, options);
  const auto source = source_of(flattened(dict), options, world, kStateLoadFailed);
  std::optional<StateLoader> loader;
  LocalValues values;
  all_or_none(world, kStateDict, kStateLoadFailed, [&] { values = local_values(model); });
  const auto elsewhere = names_elsewhere(values, world);
  all_or_none(world, kStateDict, kStateLoadFailed, [&] {
    loader.emplace(source->catalog(), std::move(values), model, elsewhere, options.may_be_unknown);
    loader->expect_parts(*source);
  });
  const auto state = loader->read(*source, world);
  all_or_none(world, kStateDict, kStateLoadFailed, [&] { optimizer.expect_state(model, state); });
  optimizer.load_state(model, state);
}

}  // namespace

OptimStateDict full_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const StateDictOptions& options) {
  const OptimizerCall call("checkpoint::full_optim_state_dict", optimizer);
  const auto world = world_for(model);
  std::optional<OwnState> own;
  all_or_none(world, kStateDict, "can't make the state dict of its optimizer", [&] { own.emplace(optimizer, model); });
  if (!same_on_all(world, checksum_value(own->description()), kStateDict)) {
    throw DisagreementError(
        "the optimizers of the ranks have state for different parameters, this one for {}; some ranks may have left out steps "
        "that others took. checkpoint::save keeps what each rank has",
        own->state.size());
  }
  expect_all_on_each(own->values, world, "the state dict of an optimizer");
  const bool wanted = !options.rank0_only || world.is_first();
  OptimStateDict dict;
  std::set<std::string> keys;
  for (const auto& [name, state] : own->state) {
    for (const auto& [key, tensor] : state) keys.insert(key);
  }
  for (const auto& key : keys) {
    const auto part_of = [&](const LocalPart& part) {
      const auto tensor = own->find(own->name_of(part), key);
      if (!tensor.defined() || tensor.dim() > 0) {
        return tensor.defined() ? tensor.reshape({-1}).narrow(0, part.offset, part.values.numel()) : tensor;
      }
      if (wanted) dict[part.name][key] = copied(tensor, options);
      return at::Tensor();
    };
    gather_like(own->values, part_of, [&](const LocalPart& part, const at::Tensor& whole) {
      if (wanted) dict[part.name][key] = copied(whole, options);
    });
  }
  for (const auto& [name, tensor] : own->values.outside) {
    const auto state = own->state.find(name);
    if (!wanted || state == own->state.end()) continue;
    for (const auto& [key, value] : state->second) dict[name][key] = copied(value, options);
  }
  return dict;
}

void load_full_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const OptimStateDict& dict,
                                const LoadStateDictOptions& options) {
  load_optimizer("checkpoint::load_full_optim_state_dict", optimizer, model, dict, options);
}

ShardedOptimStateDict sharded_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const StateDictOptions& options) {
  const OptimizerCall call("checkpoint::sharded_optim_state_dict", optimizer);
  expect_own_part(world_for(model), options);
  const OwnState own(optimizer, model);
  ShardedOptimStateDict dict;
  const auto add = [&](const std::string& name, const std::string& key, PartRecord record, const at::Tensor& flat) {
    dict[name][key] = boxes_of({.shape = std::move(record.shape),
                                .strides = std::move(record.strides),
                                .slices = std::move(record.slices),
                                .values = copied(flat, options)});
  };
  const auto add_whole = [&](const std::string& name, const std::string& key, const at::Tensor& tensor) {
    add(name, key, whole_record(tensor.sizes()), tensor.reshape({-1}));
  };
  for (const auto& part : own.values.parts) {
    const auto state = own.state.find(own.name_of(part));
    if (state == own.state.end()) continue;
    for (const auto& [key, tensor] : state->second) {
      if (tensor.dim() == 0) {
        add_whole(part.name, key, tensor);
      } else {
        auto record = records_of(part).front();
        const auto flat = tensor.reshape({-1}).narrow(0, part.offset, record.numel());
        add(part.name, key, std::move(record), flat);
      }
    }
  }
  for (const auto& [name, tensor] : own.values.outside) {
    const auto state = own.state.find(name);
    if (state == own.state.end()) continue;
    for (const auto& [key, value] : state->second) add_whole(name, key, value);
  }
  return dict;
}

void load_sharded_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const ShardedOptimStateDict& dict,
                                   const LoadStateDictOptions& options) {
  load_optimizer("checkpoint::load_sharded_optim_state_dict", optimizer, model, dict, options);
}

}  // namespace tessera::checkpoint
