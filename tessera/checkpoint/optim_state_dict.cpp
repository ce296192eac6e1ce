// The state of optimizers as state dicts.
#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>
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

/// Returns the names of parameters by the TensorImpl of their shards, which are the tensors that optimizers have.
std::map<const void*, std::string> names_of_shards(const torch::nn::Module& model) {
  std::map<const void*, std::string> names;
  for (const auto& [name, parameter] : named_parameters(model)) names[parameter.unsafeGetTensorImpl()] = name;
  return names;
}

/// The optimizer state of one rank, and the shards that it belongs to.
struct OwnState {
  OwnState(const OptimizerRef& optimizer, const torch::nn::Module& model)
      : values(local_values(model)), names(names_of_shards(model)), state(optimizer.state(model)) {
    for_each([&](const std::string&, const std::string& key, const at::Tensor& tensor, const LocalPart* part) {
      if (part == nullptr || tensor.dim() == 0 || tensor.sizes() == part->shard.sizes()) return;
      throw UsageError(
          "the state '{}' of '{}' has one value for each block of values, and so not the shape of the parameter; save it with "
          "checkpoint::save",
          key, name_of(*part));
    });
  }

  /// Returns the tensor under this key in the state of the shard `name`; undefined if there is none.
  at::Tensor find(const std::string& name, const std::string& key) const {
    const auto own = state.find(name);
    if (own == state.end()) return {};
    const auto tensor = own->second.find(key);
    return tensor == own->second.end() ? at::Tensor() : tensor->second;
  }
  /// Returns the name of a part's shard; empty if the shard is in the unit, but not in this module.
  std::string name_of(const LocalPart& part) const {
    const auto name = names.find(part.shard.unsafeGetTensorImpl());
    return name == names.end() ? std::string() : name->second;
  }

  /// Visits the state of each part and, with a null part, of each parameter that is in no unit.
  void for_each(
      c10::function_ref<void(const std::string& name, const std::string& key, const at::Tensor& tensor, const LocalPart*)> visit) const {
    const auto all_of = [&](const std::string& own, const std::string& name, const LocalPart* part) {
      const auto found = state.find(own);
      if (found == state.end()) return;
      for (const auto& [key, tensor] : found->second) visit(name, key, tensor, part);
    };
    for (const auto& part : values.parts) all_of(name_of(part), part.name, &part);
    for (const auto& [name, tensor] : values.outside) all_of(name, name, nullptr);
  }

  /// Returns the names, keys and dtypes, which must be the same on all ranks, because all ranks gather the same tensors.
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
      if (names_.contains(part.shard.unsafeGetTensorImpl())) targets[part.name] = {.part = &part, .name = part.name, .shape = part.shape};
    }
    for (const auto& [name, tensor] : values_.outside) targets[name] = {.name = name, .shape = tensor.sizes().vec()};
    for (const auto& [alias, first] : values_.aliases) {
      if (const auto known = targets.find(first); known != targets.end()) targets[alias] = known->second;
    }
    std::set<std::string> unknown;
    std::vector<std::string> misfits;
    std::set<std::pair<std::string, std::string>> taken;  // names and keys so far: the dict may have a tied parameter under several names
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
      if (!taken.emplace(target.name, key).second) continue;
      const bool is_divided = target.part != nullptr && !is_number;
      items_.push_back({.entry = entry,
                        .name = target.part != nullptr ? names_.at(target.part->shard.unsafeGetTensorImpl()) : target.name,
                        .key = key,
                        .part = target.part,
                        .records = is_divided ? records_of(*target.part) : std::vector{whole_record(tensor.shape)},
                        .dtype = tensor.dtype,
                        .is_divided = is_divided});
    }
    expect_whole_shards(misfits);
    std::vector<std::string> faults;
    if (!unknown.empty()) faults.push_back("the model has no " + some_of({unknown.begin(), unknown.end()}));
    if (!unknown.empty()) faults.emplace_back("names that may differ can be given in may_be_unknown of the options");
    faults.insert(faults.end(), misfits.begin(), misfits.begin() + std::min<std::ptrdiff_t>(std::ssize(misfits), 5));
    if (!faults.empty()) throw UsageError("the state dict is of another optimizer: {}", joined(faults, "; "));
  }

  /// Throws UsageError if the source lacks values that this rank needs.
  void expect_parts(const ValueSource& source) const {
    for (const auto& item : items_) source.expect_parts(item.entry, item.records);
  }

  /// Reads the state in the form that OptimizerRef::load_state takes. Collective.
  std::map<std::string, optim::ParameterState> read(ValueSource& source, const Communicator& world) const {
    std::map<std::string, optim::ParameterState> result;
    for (const auto& item : items_) {
      source.open(item.entry);
      auto& state = result[item.name][item.key];
      const auto read = [&](const PartRecord& record, const at::Tensor& flat, int rank) { source.read(item.entry, record, flat, rank); };
      if (item.is_divided) {
        const auto& part = *item.part;
        const auto values = read_for_ranks(part.values, item.records, item.dtype, world, read);
        if (!state.defined()) state = at::zeros(part.shard.sizes(), values.options());
        state.view({-1}).narrow(0, part.offset, part.values.numel()).copy_(values);
      } else {
        state = at::empty(item.records.front().shape, at::TensorOptions(at::kCPU).dtype(item.dtype));
        read(item.records.front(), state.view({-1}), world.local_ranks().front());
      }
    }
    return result;
  }

 private:
  /// The owner of the state in an entry: a part of a shard, or a parameter in no unit. `name` is the first name of a tied parameter.
  struct Target {
    const LocalPart* part = nullptr;
    std::string name = {};
    std::vector<int64_t> shape = {};
  };
  struct Item {
    std::string entry, name, key;  // `name` is the name in named_parameters() of the parameter or its shard
    const LocalPart* part;
    std::vector<PartRecord> records;
    at::ScalarType dtype;
    bool is_divided;  // whether each rank has a part of the tensor, not the whole tensor
  };

  static std::pair<std::string, std::string> split(const std::string& entry) {
    const auto dot = entry.rfind('.');
    return {entry.substr(0, dot), entry.substr(dot + 1)};
  }

  /// Adds a misfit for each shard of several parameters (Listing::Flat) if the dict has state for some of them only.
  void expect_whole_shards(std::vector<std::string>& misfits) const {
    std::map<std::pair<const void*, std::string>, size_t> counts;
    for (const auto& item : items_) {
      if (item.part != nullptr) counts[{item.part->shard.unsafeGetTensorImpl(), item.key}]++;
    }
    for (const auto& [place, count] : counts) {
      const auto in_shard = std::ranges::count_if(
          values_.parts, [&shard = place.first](const LocalPart& part) { return part.shard.unsafeGetTensorImpl() == shard; });
      if (std::cmp_equal(in_shard, count)) continue;
      misfits.push_back(
          fmt::format("it has '{}' of {} of the {} parameters in '{}'", place.second, count, in_shard, names_.at(place.first)));
    }
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
        "the optimizers of the ranks have state for different parameters, this rank's for {}; some ranks may have left out steps "
        "that others took. checkpoint::save can save the state of each rank as it is",
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
      const bool is_gathered = tensor.defined() && tensor.dim() > 0;
      return is_gathered ? tensor.reshape({-1}).narrow(0, part.offset, part.values.numel()) : at::Tensor();
    };
    gather_like(own->values, part_of, [&](const LocalPart& part, const at::Tensor& whole) {
      if (wanted) dict[part.name][key] = copied(whole, options);
    });
  }
  own->for_each([&](const std::string& name, const std::string& key, const at::Tensor& tensor, const LocalPart* part) {
    if (wanted && (part == nullptr || tensor.dim() == 0)) dict[name][key] = copied(tensor, options);
  });
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
  own.for_each([&](const std::string& name, const std::string& key, const at::Tensor& tensor, const LocalPart* part) {
    const bool is_divided = part != nullptr && tensor.dim() > 0;
    auto record = is_divided ? records_of(*part).front() : whole_record(tensor.sizes());
    const auto flat = tensor.reshape({-1}).narrow(0, is_divided ? part->offset : 0, record.numel());
    dict[name][key] = boxes_of({.shape = std::move(record.shape),
                                .strides = std::move(record.strides),
                                .slices = std::move(record.slices),
                                .values = copied(flat, options)});
  });
  return dict;
}

void load_sharded_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const ShardedOptimStateDict& dict,
                                   const LoadStateDictOptions& options) {
  load_optimizer("checkpoint::load_sharded_optim_state_dict", optimizer, model, dict, options);
}

}  // namespace tessera::checkpoint
