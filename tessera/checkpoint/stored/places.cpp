#include "tessera/checkpoint/stored/places.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <ranges>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kModelKeys[] = {"model.", "model_state_dict.", "state_dict."};
constexpr std::string_view kOptimizerKeys[] = {"optimizer.", "optim.", "optimizer_state_dict.", ""};
// A model may itself have a part that is called "model". Then the others are not what is kept beside a model.
constexpr std::string_view kBeside[] = {"optimizer.", "optim.", "shard_metadata.", "scheduler.", "lr_scheduler."};
constexpr std::string_view kAround[] = {"app.", "state."};  // of a model without an optimizer, by which it could be known
constexpr std::string_view kSettings = "param_groups", kState = "state.";
constexpr std::string_view kStateKeys[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "step"};
constexpr std::string_view kWrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."};
constexpr std::string_view kDistributed = "module.";  // of DistributedDataParallel
constexpr size_t kDeepest = 3;                        // keys around a parameter

/// The places in a name where one of its components begins, but not the first one.
std::vector<size_t> begins_of(std::string_view name) {
  std::vector<size_t> begins;
  for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) begins.push_back(dot + 1);
  return begins;
}

template <class Entries>
bool has_prefix(const Entries& entries, const std::string& prefix) {
  const auto found = entries.lower_bound(prefix);
  return found != entries.end() && found->first.starts_with(prefix);
}

bool ends_as_state(std::string_view name) {
  return std::ranges::find(kStateKeys, name.substr(name.rfind('.') + 1)) != std::end(kStateKeys);
}

/// What stands before the settings.
std::set<std::string> with_settings(const Catalog& catalog) {
  std::set<std::string> found;
  for (const auto& [name, value] : catalog.values) {
    auto begins = begins_of(name);
    begins.insert(begins.begin(), 0);
    for (const auto begin : begins) {
      const auto rest = std::string_view(name).substr(begin);
      if (rest != kSettings && !rest.starts_with(std::string(kSettings) + ".")) continue;
      found.insert(name.substr(0, begin));
      break;
    }
  }
  return found;
}

/// What stands before state of which all looks so, where no settings are.
std::set<std::string> with_state(const Catalog& catalog) {
  std::set<std::string> found;
  for (const auto key : kOptimizerKeys) {
    if (!key.empty() && has_prefix(catalog.tensors, std::string(key) + std::string(kState))) found.emplace(key);
  }
  if (!found.empty()) return found;
  std::set<std::string> candidates;
  for (const auto& [name, tensor] : catalog.tensors) {
    if (!ends_as_state(name)) continue;
    for (const auto begin : begins_of(name)) {
      if (name.compare(begin, kState.size(), kState) == 0) candidates.insert(name.substr(0, begin));
    }
  }
  for (const auto& prefix : candidates) {
    const auto inside = prefix + std::string(kState);
    const bool is_state = std::ranges::all_of(catalog.tensors, [&](const auto& entry) {
      return !entry.first.starts_with(inside) || ends_as_state(entry.first);
    });
    const bool is_inner = std::ranges::any_of(found, [&](const std::string& outer) { return prefix.starts_with(outer + std::string(kState)); });
    if (is_state && !is_inner) found.insert(prefix);
  }
  return found;
}

/// The names of parameters that its state has; none if it knows them by numbers.
std::set<std::string> parameters_of(const Catalog& catalog, const std::string& optimizer) {
  const auto prefix = optimizer + std::string(kState);
  std::set<std::string> names;
  for (auto entry = catalog.tensors.lower_bound(prefix); entry != catalog.tensors.end() && entry->first.starts_with(prefix); ++entry) {
    const auto dot = entry->first.rfind('.');
    if (dot > prefix.size()) names.insert(entry->first.substr(prefix.size(), dot - prefix.size()));
  }
  const auto is_number = [](const std::string& name) {
    return std::ranges::all_of(name, [](unsigned char letter) { return std::isdigit(letter) != 0; });
  };
  if (std::ranges::all_of(names, is_number)) names.clear();
  return names;
}

/// The tensors that are neither the optimizers' nor a generator's.
std::set<std::string> candidates_in(const Catalog& catalog, const Places& places) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : catalog.tensors) {
    if (!places.is_of_optimizer(name) && !(name == kGeneratorName && is_generator_state(tensor))) names.insert(name);
  }
  for (const auto& [alias, name] : catalog.aliases) {
    if (!places.is_of_optimizer(alias)) names.insert(alias);
  }
  return names;
}

bool all_begin(const std::set<std::string>& names, const std::string& prefix) {
  return !names.empty() && std::ranges::all_of(names, [&](const std::string& name) { return name.starts_with(prefix); });
}

/// By the names that programs give the key of the model.
std::string model_by_name(const std::set<std::string>& names, const Places& places) {
  const auto named = [&](const std::string& around) -> std::string {
    for (const auto each : kModelKeys) {
      const auto key = around + std::string(each);
      const bool is_there = std::ranges::any_of(names, [&](const std::string& name) { return name.starts_with(key); });
      const bool all = std::ranges::all_of(names, [&](const std::string& name) {
        return name.starts_with(key) ||
               std::ranges::any_of(kBeside, [&](std::string_view other) { return name.starts_with(around + std::string(other)); });
      });
      if (is_there && (all || (places.optimizer && places.optimizer->size() > around.size()))) return key;
    }
    return around;
  };
  auto key = named(places.around);
  for (const auto around : kAround) {
    if (key.empty() && all_begin(names, std::string(around)) && named(std::string(around)) != around) key = named(std::string(around));
  }
  const auto distributed = key + std::string(kDistributed);
  return all_begin(names, distributed) ? distributed : key;
}

/// By the parameters that it must have; the same as by name if these do not tell. Of weights alone nothing is left out for that.
std::string model_by_content(const std::set<std::string>& names, const std::set<std::string>& parameters, const Places& places,
                             const std::string& by_name) {
  std::map<std::string, size_t> found;
  for (const auto& name : names) {
    auto begins = begins_of(name);
    begins.insert(begins.begin(), 0);
    for (size_t i = 0; i < std::min(begins.size(), kDeepest + 1); i++) {
      if (parameters.contains(name.substr(begins[i]))) found[name.substr(0, begins[i])]++;
    }
  }
  if (found.empty()) return by_name;
  const auto most = std::ranges::max(found | std::views::values);
  if (const auto named = found.find(by_name); named != found.end() && named->second == most) return by_name;
  std::erase_if(found, [&](const auto& entry) { return entry.second < most; });
  const auto& best = found.begin()->first;
  const bool is_clear = best.empty() || (found.size() == 1 && (places.optimizer || all_begin(names, best)));
  return is_clear ? best : by_name;
}

}  // namespace

bool Places::is_of_optimizer(const std::string& name) const {
  const auto is_of = [&](const std::string& prefix) {
    return name.starts_with(prefix + std::string(kState)) || name.starts_with(prefix + std::string(kSettings));
  };
  return (optimizer && is_of(*optimizer)) || std::ranges::any_of(other_optimizers, is_of);
}

Places places_in(const Catalog& catalog, const std::set<std::string>& parameters) {
  Places places;
  auto optimizers = with_settings(catalog);
  if (optimizers.empty()) optimizers = with_state(catalog);
  for (const auto key : kOptimizerKeys) {
    if (!places.optimizer && optimizers.contains(std::string(key))) places.optimizer = std::string(key);
  }
  if (!places.optimizer && optimizers.size() == 1) places.optimizer = *optimizers.begin();
  if (places.optimizer) optimizers.erase(*places.optimizer);
  places.other_optimizers = std::move(optimizers);
  const auto names = candidates_in(catalog, places);
  const auto& first = names.empty() ? std::string() : *names.begin();
  const auto around = first.substr(0, first.find('.') + 1);
  if (places.optimizer && !around.empty() && places.optimizer->starts_with(around) && *places.optimizer != around && all_begin(names, around))
    places.around = around;
  const auto by_name = model_by_name(names, places);
  const auto known = parameters.empty() && places.optimizer ? parameters_of(catalog, *places.optimizer) : parameters;
  places.model = model_by_content(names, known, places, by_name);
  return places;
}

std::string without_wrappers(const std::string& name) {
  auto result = name;
  for (const auto wrapper : kWrappers) {
    for (auto at = result.find(wrapper); at != std::string::npos; at = result.find(wrapper, at)) {
      if (at == 0 || result[at - 1] == '.') {
        result.erase(at, wrapper.size());
      } else {
        at++;
      }
    }
  }
  return result;
}

bool is_generator_state(const StoredTensor& tensor) {
  return tensor.dtype == at::kByte && tensor.shape.size() == 1;
}

}  // namespace tessera::checkpoint
