#include "tessera/checkpoint/stored/places.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <ranges>

#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kModelKeys[] = {"model.", "model_state_dict.", "state_dict."};
constexpr std::string_view kOptimizerKeys[] = {"optimizer.", "optim.", "optimizer_state_dict.", ""};
// Keys that programs save next to the model's key. If a file has other keys, "model." may be a part of the names in the model.
constexpr std::string_view kBeside[] = {"optimizer.", "optim.", "shard_metadata.", "scheduler.", "lr_scheduler."};
constexpr std::string_view kAround[] = {"app.", "state."};  // keys that may contain the model's key, tried if none is found without them
constexpr std::string_view kSettings = "param_groups", kState = "state.";
constexpr std::string_view kStateKeys[] = {"exp_avg",    "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer",
                                           "square_avg", "grad_avg",   "sum",            "step"};
constexpr std::string_view kModuleWrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."};
constexpr size_t kDeepest = 3;  // most keys in front of a parameter's name

/// Returns where the components of a name, which dots separate, begin.
std::vector<size_t> begins_of(std::string_view name) {
  std::vector<size_t> begins = {0};
  for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) begins.push_back(dot + 1);
  return begins;
}

/// The ends of a name that may be a parameter's name, with at most kDeepest keys in front of it.
std::vector<std::string> ends_of(const std::string& name) {
  std::vector<std::string> ends;
  for (const auto begin : begins_of(name)) {
    if (ends.size() <= kDeepest) ends.push_back(name.substr(begin));
  }
  return ends;
}

bool ends_as_state(std::string_view name) {
  return std::ranges::find(kStateKeys, name.substr(name.rfind('.') + 1)) != std::end(kStateKeys);
}

/// The tensors of state under an optimizer's key.
auto state_under(const Catalog& catalog, const std::string& optimizer) {
  const auto prefix = optimizer + std::string(kState);
  const auto begin = catalog.tensors.lower_bound(prefix);
  auto end = begin;
  while (end != catalog.tensors.end() && end->first.starts_with(prefix)) ++end;
  return std::ranges::subrange(begin, end);
}

/// The names, or the numbers, of the parameters that have state under this key.
std::set<std::string> names_in_state(const Catalog& catalog, const std::string& optimizer) {
  const auto begin = optimizer.size() + kState.size();
  std::set<std::string> names;
  for (const auto& [name, tensor] : state_under(catalog, optimizer)) {
    const auto dot = name.rfind('.');
    if (dot > begin) names.insert(name.substr(begin, dot - begin));
  }
  return names;
}

/// Returns the optimizers' prefixes, which are in front of param_groups in the names of values.
std::set<std::string> with_settings(const Catalog& catalog) {
  std::set<std::string> found;
  for (const auto& [name, value] : catalog.values) {
    for (const auto begin : begins_of(name)) {
      const auto rest = std::string_view(name).substr(begin);
      if (rest != kSettings && !rest.starts_with(std::string(kSettings) + ".")) continue;
      found.insert(name.substr(0, begin));
      break;
    }
  }
  return found;
}

/// Returns the optimizers' prefixes in a file without param_groups: those under which all tensors look like an optimizer's state. Since a
/// model's buffers may look like that, too, a prefix is left out if names in `of_model` are under it, or if none of the parameters under it
/// is a number or the name of another tensor in the file.
std::set<std::string> with_state(const Catalog& catalog, const std::set<std::string>& of_model) {
  const auto is_in_model = [&](const std::string& prefix) {
    return std::ranges::any_of(state_under(catalog, prefix), [&](const auto& entry) {
      const auto is_its = [&](size_t begin) { return begin <= prefix.size() && of_model.contains(entry.first.substr(begin)); };
      return std::ranges::any_of(begins_of(entry.first), is_its);
    });
  };
  std::set<std::string> found;
  for (const auto key : kOptimizerKeys) {
    const auto prefix = std::string(key);
    if (!key.empty() && !state_under(catalog, prefix).empty() && !is_in_model(prefix)) found.insert(prefix);
  }
  if (!found.empty()) return found;
  std::set<std::string> candidates;
  for (const auto& [name, tensor] : catalog.tensors) {
    if (!ends_as_state(name)) continue;
    for (const auto begin : begins_of(name)) {
      if (begin > 0 && name.compare(begin, kState.size(), kState) == 0) candidates.insert(name.substr(0, begin));
    }
  }
  for (const auto& prefix : candidates) {
    const bool is_state = std::ranges::all_of(state_under(catalog, prefix), [](const auto& entry) { return ends_as_state(entry.first); });
    const auto is_around = [&](const std::string& outer) { return prefix.starts_with(outer + std::string(kState)); };
    if (is_state && std::ranges::none_of(found, is_around) && !is_in_model(prefix)) found.insert(prefix);
  }
  if (found.empty()) return found;
  std::set<std::string> outside;
  const auto add_outside = [&](const std::string& name) {
    const auto is_of = [&](const std::string& prefix) { return name.starts_with(prefix + std::string(kState)); };
    if (std::ranges::any_of(found, is_of)) return;
    const auto ends = ends_of(name);
    outside.insert(ends.begin(), ends.end());
  };
  for (const auto& [name, tensor] : catalog.tensors) add_outside(name);
  for (const auto& [alias, name] : catalog.aliases) add_outside(alias);
  const auto is_known = [&](const std::string& name) {
    return is_number(name) || outside.contains(name) || (name.starts_with(kDistributed) && outside.contains(name.substr(kDistributed.size())));
  };
  std::erase_if(found, [&](const std::string& prefix) { return std::ranges::none_of(names_in_state(catalog, prefix), is_known); });
  return found;
}

/// Returns the parameters in the optimizer's state, each as a list of its one name; none if the state has numbers in place of names.
std::vector<std::vector<std::string>> parameters_of(const Catalog& catalog, const std::string& optimizer) {
  std::vector<std::vector<std::string>> parameters;
  const auto names = names_in_state(catalog, optimizer);
  if (std::ranges::all_of(names, is_number)) return parameters;
  for (const auto& name : names) parameters.push_back({name});
  return parameters;
}

/// Returns the names of the tensors that are neither state of an optimizer nor of a generator.
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

/// Finds the key of the model among the keys that programs use.
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

/// Returns the key under which all parameters are, or `by_name` if that key is not clear. Without an optimizer, all names must begin with
/// the key.
std::string model_by_content(const std::set<std::string>& names, const std::vector<std::vector<std::string>>& parameters,
                             const Places& places, const std::string& by_name) {
  std::map<std::string, size_t> numbers;
  for (size_t i = 0; i < parameters.size(); i++) {
    for (const auto& name : parameters[i]) numbers[name] = i;
  }
  std::map<std::string, std::set<size_t>> found;
  for (const auto& name : names) {
    for (const auto& end : ends_of(name)) {
      const auto known = numbers.find(end);
      if (known != numbers.end()) found[name.substr(0, name.size() - end.size())].insert(known->second);
    }
  }
  std::erase_if(found, [&](const auto& entry) { return entry.second.size() < parameters.size(); });
  if (found.empty() || found.contains(by_name)) return by_name;
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

bool is_number(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

Places places_in(const Catalog& catalog, const ModelNames& names) {
  Places places;
  auto optimizers = with_settings(catalog);
  if (optimizers.empty()) optimizers = with_state(catalog, names.all);
  for (const auto key : kOptimizerKeys) {
    if (!places.optimizer && optimizers.contains(std::string(key))) places.optimizer = std::string(key);
  }
  if (!places.optimizer && optimizers.size() == 1) places.optimizer = *optimizers.begin();
  if (places.optimizer) optimizers.erase(*places.optimizer);
  places.other_optimizers = std::move(optimizers);
  const auto tensors = candidates_in(catalog, places);
  const auto& first = tensors.empty() ? std::string() : *tensors.begin();
  const auto around = first.substr(0, first.find('.') + 1);
  const bool is_around = !around.empty() && places.optimizer && places.optimizer->starts_with(around) && *places.optimizer != around;
  if (is_around && all_begin(tensors, around)) places.around = around;
  const auto by_name = model_by_name(tensors, places);
  const auto known = names.all.empty() && places.optimizer ? parameters_of(catalog, *places.optimizer) : names.parameters;
  places.model = model_by_content(tensors, known, places, by_name);
  return places;
}

std::string without_wrappers(const std::string& name) {
  auto result = name;
  for (const auto wrapper : kModuleWrappers) {
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
