#include "tessera/checkpoint/stored/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <ranges>

#include "tessera/base/error.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

template <class Entries>
bool has_prefix(const Entries& entries, const std::string& prefix) {
  const auto found = entries.lower_bound(prefix);
  return found != entries.end() && found->first.starts_with(prefix);
}

/// The settings of an optimizer: what PyTorch calls param_groups.
class Settings {
 public:
  void add(const std::string& name, const json& value) {
    const auto dot = name.rfind('.');
    if (dot == std::string::npos) return;
    const auto group = name.substr(0, dot), key = name.substr(dot + 1);
    if (is_number(group) && group.size() < 10) {
      groups_[std::stoi(group)][key] = value;
    } else {
      parameters_[group][key] = value;
    }
  }

  /// Returns the names of parameters by the numbers that identify them in the state, from groups that list both.
  std::map<std::string, std::string> names() const {
    std::map<std::string, std::string> result;
    for (const auto& [number, group] : groups_) {
      if (!group.contains("params") || !group.contains("param_names")) continue;
      const auto &numbers = group["params"], &names = group["param_names"];
      for (size_t i = 0; numbers.is_array() && names.is_array() && i < std::min(numbers.size(), names.size()); i++) {
        if (numbers[i].is_number_integer() && names[i].is_string()) result[numbers[i].dump()] = names[i].get<std::string>();
      }
    }
    return result;
  }

  /// Returns the names by numbers as Python's load_state_dict assigns them: by positions in the groups. Empty unless `groups` have the same
  /// sizes as the saved groups.
  std::map<std::string, std::string> names(const std::vector<std::vector<std::string>>& groups) const {
    std::map<std::string, std::string> result;
    if (groups.size() != groups_.size()) return {};
    for (size_t i = 0; const auto& [number, group] : groups_) {
      const auto params = group.find("params");
      const auto& names = groups[i++];
      if (params == group.end() || !params->is_array() || params->size() != names.size()) return {};
      for (size_t k = 0; k < names.size(); k++) result[(*params)[k].dump()] = names[k];
    }
    return result;
  }

  /// Whether the state identifies parameters by numbers.
  bool has_numbers() const {
    return std::ranges::any_of(groups_, [](const auto& entry) {
      const auto params = entry.second.find("params");
      return params != entry.second.end() && params->is_array() && !params->empty() && params->front().is_number();
    });
  }

  json with_names() && {
    auto result = json::array();
    for (auto& [number, group] : groups_) {
      if (group.contains("param_names")) {
        group["params"] = group["param_names"];
        group.erase("param_names");
      }
      result.push_back(std::move(group));
    }
    std::map<json, json> names;  // a flattened state dict has settings for each parameter
    for (const auto& [name, settings] : parameters_) names[settings].push_back(name);
    for (const auto& [settings, params] : names) {
      result.push_back(settings);
      result.back()["params"] = params;
    }
    return result;
  }

 private:
  std::map<int, json> groups_;
  std::map<std::string, json> parameters_;
};

/// Returns a number by which ranks notice that they read different checkpoints.
uint64_t number_of(const Catalog& catalog) {
  std::string all;
  for (const auto& [name, tensor] : catalog.tensors) all += fmt::format("{} {} ", name, tensor.boxes.size());
  for (const auto& bytes : catalog.checksums) all += bytes.checksum;
  return checksum_value(all) >> 32;
}

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', false, json::error_handler_t::replace);
}

void set_optimizer(Manifest& run, const json& groups) {
  run.optimizer = groups.empty() ? kSomeOptimizer : class_of_settings(groups.front());
  if (!groups.empty()) run.notes.front()[kSettingsNote] = text_of(groups);
}

/// Returns the run of a catalog that already has Tessera's names for the model and the optimizer's state. Takes the settings of group 0:
/// TorchXlaReader reads state only if there is a single group.
Manifest run_of_torch_xla(Catalog catalog) {
  constexpr std::string_view kSettings = "optimizer.param_groups.0.";
  Manifest run{.notes = {{}}};
  auto group = json::object();
  for (const auto& [name, value] : catalog.values) {
    if (name.starts_with(kSettings)) {
      group[name.substr(kSettings.size())] = value;
    } else if (!name.starts_with("optimizer.") && !name.starts_with("shard_metadata.")) {
      run.notes.front()[name] = text_of(value);
    }
  }
  auto parameters = json::array();
  bool has_state = false;
  for (const auto& [name, tensor] : catalog.tensors) {
    if (catalog.buffers.contains(name)) continue;
    const bool is_state = name.starts_with(kOptimizerPrefix);
    has_state |= is_state;
    if (!is_state) parameters.push_back(name);
  }
  if (!group.empty()) group["params"] = parameters;
  if (has_state) set_optimizer(run, group.empty() ? json::array() : json::array({group}));
  run.save = number_of(catalog);
  run.not_state = catalog.buffers;
  run.catalog = std::move(catalog);
  return run;
}

/// Makes the manifest of a training run from a catalog with another program's names. Decides whether each tensor and value is the model's,
/// the optimizer's, an extra tensor, a note, or something that can't be used.
class Sorting {
 public:
  Sorting(Catalog catalog, const ModelNames& names)
      : from_(unwrapped(std::move(catalog))),
        places_(places_in(from_, names)),
        model_(places_.model),
        optimizer_(places_.optimizer),
        groups_(names.groups) {
    auto& to = run_.catalog;
    to.files = std::move(from_.files);
    to.checksums = std::move(from_.checksums);
    to.left_out = std::move(from_.left_out);
    to.faults = std::move(from_.faults);
    to.save = std::move(from_.save);
    run_.notes.resize(1);
  }

  Manifest finish() && {
    for (const auto& [name, value] : from_.values) {
      if (const auto rest = behind(name, "param_groups.")) settings_.add(*rest, value);
    }
    names_ = settings_.names();
    if (names_.empty() && settings_.has_numbers()) names_ = settings_.names(groups_);
    for (const auto& [name, tensor] : from_.tensors) add_tensor(name, tensor);
    add_generator();
    for (const auto& [alias, first] : from_.aliases) add_alias(alias, first);
    for (const auto& [name, value] : from_.values) add_value(name, value);
    finish_optimizer();
    run_.save = number_of(run_.catalog);
    return std::move(run_);
  }

 private:
  /// Returns the rest of a name that begins with the optimizer's key and `part`; nothing for other names.
  std::optional<std::string> behind(const std::string& name, std::string_view part) const {
    if (!optimizer_ || !name.starts_with(*optimizer_ + std::string(part))) return std::nullopt;
    return name.substr(optimizer_->size() + part.size());
  }

  void add_tensor(const std::string& name, const StoredTensor& tensor) {
    if (const auto rest = behind(name, "state.")) {
      add_state(*rest, tensor);
    } else if (places_.is_of_optimizer(name)) {
      run_.catalog.left_out.emplace(name, kOneOfSeveral);
    } else if (name == kGeneratorName && !model_.empty() && is_generator_state(tensor)) {
      generator_ = &tensor;
    } else if (name.starts_with(model_)) {
      const auto own = name.substr(model_.size());
      if (own.starts_with(kOptimizerPrefix)) run_.not_state.insert(own);
      add_new(own, tensor);
    } else {
      add_beside(name, tensor);
    }
  }

  void add_new(const std::string& name, const StoredTensor& tensor) {
    if (run_.catalog.tensors.emplace(name, tensor).second) return;
    throw IoError("the model and the state of its optimizer both have a tensor '{}', so they can't be told apart", name);
  }

  void add_beside(const std::string& name, const StoredTensor& tensor) {
    const auto own = without_around(name);
    const auto stored = kBesidePrefix + own;
    if (is_free_name(own) && run_.catalog.tensors.emplace(stored, tensor).second) {
      run_.beside.insert(stored);
    } else {
      run_.catalog.left_out.emplace(name, "it is neither the model's nor the optimizer's, and its name is reserved or taken");
    }
  }

  std::string without_around(const std::string& name) const {
    return name.substr(name.starts_with(places_.around) ? places_.around.size() : 0);
  }

  void add_generator() {
    if (generator_ == nullptr) return;
    run_.generator = kHiddenGeneratorName;
    run_.catalog.tensors.emplace(run_.generator, *generator_);
  }

  void add_state(const std::string& name, const StoredTensor& tensor) {
    const auto dot = name.rfind('.');
    if (dot == std::string::npos) {
      run_.catalog.left_out.emplace(*optimizer_ + "state." + name, "it is optimizer state of no parameter");
      return;
    }
    auto parameter = name.substr(0, dot);
    if (model_.ends_with(kDistributed) && parameter.starts_with(kDistributed)) parameter.erase(0, kDistributed.size());
    if (settings_.has_numbers() || (!has_settings() && is_number(parameter))) {
      const auto known = names_.find(parameter);
      if (known == names_.end()) {
        by_numbers_ = true;
        return;
      }
      parameter = known->second;
    }
    add_new(kOptimizerPrefix + parameter + name.substr(dot), tensor);
    has_state_ = true;
  }

  bool has_settings() const { return optimizer_ && has_prefix(from_.values, *optimizer_ + "param_groups"); }

  void add_alias(const std::string& alias, const std::string& first) {
    const auto is_plain = [&](const std::string& name) { return name.starts_with(model_) && !behind(name, "state."); };
    if (is_plain(alias) && is_plain(first)) {
      run_.catalog.aliases[alias.substr(model_.size())] = first.substr(model_.size());
    } else if (const auto tensor = from_.tensors.find(first); tensor != from_.tensors.end()) {
      add_tensor(alias, tensor->second);
    }
  }

  void add_value(const std::string& name, const json& value) {
    if (behind(name, "param_groups")) return;
    if (!behind(name, "state.") && places_.is_of_optimizer(name)) {
      run_.catalog.left_out.emplace(name, kOneOfSeveral);
      return;
    }
    const auto state = behind(name, "state.");
    if (state && value.is_null()) return;  // state of SGD without momentum
    if (state || value.is_binary() || (!model_.empty() && name.starts_with(model_))) {
      run_.catalog.left_out.emplace(name, state               ? "it is a number where PyTorch has had tensors since 1.12"
                                          : value.is_binary() ? "it is a bytes object"
                                                              : "it is a value of the model that is not a tensor");
      return;
    }
    run_.notes.front()[without_around(name)] = text_of(value);
  }

  void finish_optimizer() {
    if (!optimizer_ && !places_.other_optimizers.empty()) run_.catalog.left_out["optimizer.state"] = kOneOfSeveral;
    if (by_numbers_) {
      run_.catalog.left_out["optimizer.state"] =
          groups_.empty() ? "it knows the parameters by numbers only. Save what get_optimizer_state_dict (torch.distributed.checkpoint."
                            "state_dict) returns, or give the optimizer model.named_parameters(), or load with .optimizer_by_numbers = "
                            "true if the parameters are in the same order there"
                          : "it knows the parameters by numbers, and its groups have other sizes than those of the optimizer here";
      std::erase_if(run_.catalog.tensors,
                    [&](const auto& entry) { return entry.first.starts_with(kOptimizerPrefix) && !run_.not_state.contains(entry.first); });
      return;
    }
    if (!has_state_ && !has_settings()) return;
    set_optimizer(run_, std::move(settings_).with_names());
  }

  static Catalog unwrapped(Catalog catalog) {
    const auto rename = [](auto& entries) {
      std::remove_reference_t<decltype(entries)> renamed;
      for (auto& [name, value] : entries) renamed.emplace(without_wrappers(name), std::move(value));
      if (renamed.size() == entries.size()) entries = std::move(renamed);
    };
    rename(catalog.tensors);
    rename(catalog.values);
    for (auto& [alias, name] : catalog.aliases) name = without_wrappers(name);
    rename(catalog.aliases);
    return catalog;
  }

  static constexpr auto kOneOfSeveral =
      "it is of one of several optimizers, of which Tessera loads only one with a usual name such as 'optimizer'";

  Catalog from_;
  const Places places_;
  const std::string& model_;
  const std::optional<std::string>& optimizer_;
  const std::vector<std::vector<std::string>>& groups_;
  const StoredTensor* generator_ = nullptr;
  Settings settings_;
  std::map<std::string, std::string> names_;
  bool by_numbers_ = false, has_state_ = false;
  Manifest run_;
};

}  // namespace

Manifest run_of(Catalog catalog, const ModelNames& names) {
  return Sorting(std::move(catalog), names).finish();
}

Manifest read_run(const std::filesystem::path& path, const ModelNames& names) {
  const auto format = format_of(path);
  if (format == Format::Tessera) return read_manifest(path);
  if (format == Format::TorchXla) return run_of_torch_xla(read_catalog(path));
  auto catalog = read_catalog(path);
  // Formats with only weights have no keys in front of the model's names: "model." is a part of these names, as in a language model with a
  // tied head.
  if (row_of(format).model_alone && names.all.empty()) return {.save = number_of(catalog), .catalog = std::move(catalog), .notes = {{}}};
  auto run = run_of(std::move(catalog), names);
  const auto generator = run.catalog.tensors.find(run.generator);
  if (format == Format::Accelerate && generator != run.catalog.tensors.end()) {  // one box for each rank
    run.ranks = static_cast<int>(std::max<size_t>(generator->second.boxes.size(), 1));
    run.notes.resize(generator->second.boxes.size(), run.notes.front());
  }
  return run;
}

std::map<std::string, std::string> notes_of_rank(const Manifest& run, int rank, int ranks, const LoadOptions& options) {
  const bool has_own = run.ranks == ranks;
  const auto& own = run.notes.at(has_own ? static_cast<size_t>(rank) : 0);
  if (has_own || options.notes_of_first_rank) return own;
  std::map<std::string, std::string> all;
  for (const auto& notes : run.notes) all.insert(notes.begin(), notes.end());
  for (const auto& [name, text] : all) {
    const auto differs = [&](const auto& others) {
      const auto other = others.find(name);
      return other == others.end() || other->second != text;
    };
    if (std::ranges::any_of(run.notes, differs)) {
      throw UsageError(
          "the {} ranks that saved had different notes '{}', and here are {} ranks; load with "
          "{{.notes_of_first_rank = true}} if those of rank 0 are right for all",
          run.ranks, name, ranks);
    }
  }
  return own;
}

StateName state_name(const std::string& name) {
  const auto begin = std::string_view(kOptimizerPrefix).size();
  const auto dot = name.rfind('.');
  return {.parameter = dot <= begin ? "" : name.substr(begin, dot - begin), .key = name.substr(dot + 1)};
}

bool is_optimizer_state(const std::string& name, const Manifest& manifest) {
  return !manifest.optimizer.empty() && name.starts_with(kOptimizerPrefix) && !manifest.not_state.contains(name);
}

bool is_of_model(const std::string& name, const Manifest& manifest) {
  return name != manifest.generator && name != manifest.device_generator && !manifest.beside.contains(name) &&
         !is_optimizer_state(name, manifest);
}

std::vector<std::string> names_beside(const Manifest& manifest) {
  std::vector<std::string> names;
  for (const auto& name : manifest.beside) names.push_back(name.substr(std::string_view(kBesidePrefix).size()));
  return names;
}

bool is_free_name(const std::string& name) {
  const auto key = name.substr(0, name.find('.'));
  return !key.empty() && key != "model" && key != "optimizer" && name != kGeneratorName;
}

}  // namespace tessera::checkpoint
