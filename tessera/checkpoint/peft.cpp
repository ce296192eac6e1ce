#include "tessera/checkpoint/peft.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/paging_key.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/narrowed.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr auto kPrefix = "base_model.model.";

/// Values of init_lora_weights that only set the adapter's initial values; other values change the base, too.
constexpr const char* kPlainInits[] = {"gaussian", "orthogonal", "eva"};

/// Keys of settings that change a model and that Tessera lacks: read_adapter_config() throws for any value but an empty one.
constexpr const char* kUnread[] = {"layers_to_transform",
                                   "layers_pattern",
                                   "lora_bias",
                                   "fan_in_fan_out",
                                   "layer_replication",
                                   "use_bdlora",
                                   "alora_invocation_tokens",
                                   "trainable_token_indices",
                                   "target_parameters",
                                   "use_qalora",
                                   "kasa_config",
                                   "monteclora_config",
                                   "arrow_config",
                                   "velora_config"};

/// The type of a setting that is written as false and never read.
struct Unread {};

/// Calls `field` with the key of each setting and a reference to its value, in the order in which settings are written.
void visit_settings(auto& options, auto&& field) {
  field("r", options.r);
  field("lora_alpha", options.lora_alpha);
  field("lora_dropout", options.lora_dropout);
  field("use_rslora", options.use_rslora);
  field("use_dora", options.use_dora);
  field("bias", options.bias);
  field("init_lora_weights", options.init_lora_weights);
  Unread unread;
  field("fan_in_fan_out", unread);
  field("rank_pattern", options.rank_pattern);
  field("alpha_pattern", options.alpha_pattern);
  field("modules_to_save", options.modules_to_save);
  field("exclude_modules", options.layers.exclude_modules);
  field("target_modules", options.layers);
}

Json config_of(const lora::Options& options, const AdapterFile& about) {
  Json json = {{"peft_type", "LORA"},
               {"base_model_name_or_path", about.base},
               {"task_type", about.task_type.empty() ? Json() : Json(about.task_type)},
               {"inference_mode", true}};
  visit_settings(options, [&]<class T>(const char* key, const T& value) {
    auto& out = json[key];
    if constexpr (std::is_arithmetic_v<T>) {
      out = value;
    } else if constexpr (std::is_same_v<T, Unread>) {
      out = false;
    } else if constexpr (std::is_same_v<T, lora::Bias>) {
      out = lora::name_of(value);
    } else if constexpr (std::is_same_v<T, lora::Init>) {
      out = value == lora::Init::Pissa ? Json("pissa") : Json(true);
    } else if constexpr (std::is_same_v<T, nn::LayerChoice>) {
      out = value.target_pattern.empty() ? Json(value.target_modules) : Json(value.target_pattern);
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      if (!value.empty()) out = value;
    } else {
      out = Json::object();
      for (const auto& [pattern, each] : value) out[pattern] = each;
    }
  });
  return json;
}

/// Returns a map from the names of the adapter's tensors in its file to their names in the model.
std::map<std::string, std::string> names_in_file(ConstModuleRef model, const std::string& adapter) {
  std::map<std::string, std::string> names;
  std::set<std::string> of_layers;  // biases of layers with adapters
  const auto& options = lora::options_of(model, adapter);
  for (const auto& layer : lora::layers_of(model, adapter)) {
    for (const auto& [key, name] : layer.names) names[fmt::format("{}{}.{}", kPrefix, layer.name, key)] = name;
    if (options.bias == lora::Bias::None || !layer.has_bias) continue;
    of_layers.insert(layer.name + ".bias");
    names[fmt::format("{}{}.base_layer.bias", kPrefix, layer.name)] = layer.name + ".bias";
  }
  for (const auto& item : model->named_parameters()) {
    const auto& name = item.key();
    const auto is_in = [&](const std::string& module) { return ("." + name).find("." + module + ".") != std::string::npos; };
    const bool is_bias = options.bias == lora::Bias::All && nn::is_named(name, "bias") && !of_layers.contains(name);
    if (is_bias || std::ranges::any_of(options.modules_to_save, is_in)) names[kPrefix + name] = name;
  }
  return names;
}

void write_files(const fs::path& folder, const std::map<std::string, at::Tensor>& values, const lora::Options& options,
                 const AdapterFile& about) {
  expect_no_model(folder);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, value] : values) entries.push_back({.name = name, .dtype = value.scalar_type(), .sizes = value.sizes().vec()});
  make_folder(folder);
  SafetensorsWriter writer(folder / kAdapterWeights, std::move(entries), {{"format", "pt"}});
  for (const auto& [name, value] : values) writer.write(value);
  writer.close();
  write_text(folder / kAdapterConfig, config_of(options, about).dump(2) + "\n");
}

/// Opens the weights of an adapter, and compares all of them with their checksums.
CatalogReader open_weights(const fs::path& folder) {
  CatalogReader stored(read_model(adapter_weights(folder)));
  for (const auto& bytes : stored.catalog().checksums) stored.verify(bytes);
  return stored;
}

/// Throws IoError unless the matrix A of a layer, with these sizes in the file, has the rank that adapter_config.json says.
void expect_rank(const fs::path& file, const std::string& layer, at::IntArrayRef sizes, const lora::Options& options) {
  const auto said = lora::rank_of(options, layer), found = sizes.empty() ? 0 : sizes.front();
  if (found == said) return;
  throw IoError("{}: the matrix A of '{}' has rank {}, but r in {} says {}; take both files from the same run", file, layer, found,
                kAdapterConfig, said);
}

/// A tensor of a layer's adapter, with the end of its name in files.
struct AdapterPart {
  std::string_view end;
  at::Tensor lora::Weights::*member;
  bool of_embedding;
};
constexpr AdapterPart kAdapterParts[] = {{".lora_A.weight", &lora::Weights::a, false},
                                         {".lora_B.weight", &lora::Weights::b, false},
                                         {".lora_embedding_A", &lora::Weights::a, true},
                                         {".lora_embedding_B", &lora::Weights::b, true},
                                         {".lora_magnitude_vector", &lora::Weights::magnitude, false}};

}  // namespace

void save_adapter(ConstModuleRef model, const fs::path& folder, const Communicator& world, const AdapterFile& options) {
  const Calling calling("checkpoint::save_adapter");
  const BelowPaging below;
  const auto here = local_values(*model);
  auto names = names_in_file(model, options.adapter);
  std::map<std::string, at::Tensor> whole;  // tensors by their names in the model; undefined until they are gathered
  for (auto& [in_file, name] : names) {
    if (const auto first = here.aliases.find(name); first != here.aliases.end()) name = first->second;
    whole.try_emplace(name);
  }
  gather_like(
      here, [&](const LocalPart& part) { return whole.contains(part.name) ? part.values : at::Tensor(); },
      [&](const LocalPart& part, const at::Tensor& value) {
        if (world.is_first())
          whole[part.name] = value.to(at::kCPU, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
      });
  all_or_none(world, {.unit = "adapter"}, fmt::format("could not write {}", folder.string()), [&] {
    if (!world.is_first()) return;
    std::map<std::string, at::Tensor> values;  // tensors by their names in the file
    for (const auto& [in_file, name] : names) {
      const auto& gathered = whole.at(name);
      values[in_file] = gathered.defined() ? gathered : here.outside.at(name).cpu().contiguous();
    }
    auto own = lora::options_of(model, options.adapter);
    if (own.layers.target_modules.empty() && own.layers.target_pattern.empty()) {
      for (const auto& layer : lora::layers_of(model, options.adapter)) own.layers.target_modules.push_back(layer.name);
    }
    write_files(folder, values, own, options);
  });
}

void expect_no_model(const fs::path& folder) {
  if (is_complete(folder))
    throw UsageError("{} is a checkpoint, and programs would load an adapter there in place of it; write to another folder", folder);
  if (!is_hub_folder(folder) && !is_there(folder / "config.json")) return;
  throw UsageError("{} has a model, to which programs would apply an adapter in the same folder; write to another folder", folder);
}

lora::Options read_adapter_config(const fs::path& folder) {
  const auto path = folder / kAdapterConfig;
  if (!is_there(path)) {
    const bool is_gguf = is_there(folder) && !is_folder(folder) && is_gguf_file(folder);
    throw UsageError("{} is not a folder of PEFT: it has no {}{}", folder, kAdapterConfig,
                     is_gguf ? "; `tessera ckpt convert FILE FOLDER --to hub` converts a GGUF file to such a folder" : "");
  }
  const auto json = Json::parse(InputFile(path).read_all(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", path);
  const auto refuse = [&](const std::string& key) {
    throw ConfigError("{}: {}: {} is not read here", path, key, json.value(key, Json()).dump());
  };
  std::string at_key;
  // json::get<int64_t>() would convert a number that does not fit to an arbitrary number.
  const auto rank_of = [&](const Json& value) {
    const auto r = value.get<double>();
    if (value.is_number_integer() && r >= 1 && r <= static_cast<double>(lora::kMostRank)) return value.get<int64_t>();
    throw ConfigError("{}: {}: the rank can't be {}; give a whole number from 1 to {}", path, at_key, value.dump(), lora::kMostRank);
  };
  const auto is_nothing = [](const Json& value) { return value.is_null() || value == false || value.empty(); };
  try {
    if (json.value("peft_type", "") != "LORA") refuse("peft_type");
    for (const auto* key : kUnread) {
      if (!is_nothing(json.value(key, Json()))) refuse(key);
    }
    lora::Options options;
    json.at(at_key = "target_modules");  // throws if the key is missing
    visit_settings(options, [&]<class T>(const char* key, T& value) {
      const auto given = json.value(at_key = key, Json());
      const bool is_text = given.is_string();
      constexpr bool must_be_set = std::is_arithmetic_v<T> || std::is_same_v<T, lora::Bias>;
      if (given.is_null() && (!must_be_set || !json.contains(key))) return;
      if constexpr (std::is_same_v<T, nn::LayerChoice>) {
        if (is_text && given != "all-linear") given.get_to(value.target_pattern);
        if (given.is_array()) given.get_to(value.target_modules);
      } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
        if (is_text) refuse(key);  // a regular expression, which Tessera takes only for target_modules
        given.get_to(value);
      } else if constexpr (std::is_same_v<T, int64_t>) {
        value = rank_of(given);
      } else if constexpr (std::is_arithmetic_v<T>) {
        given.get_to(value);
      } else if constexpr (std::is_same_v<T, lora::Bias>) {
        const auto bias = lora::bias_named(given.template get<std::string>());
        if (!bias) refuse(key);
        value = *bias;
      } else if constexpr (std::is_same_v<T, lora::Init>) {
        if (given == "pissa") {
          value = lora::Init::Pissa;
        } else if (is_text && std::ranges::count(kPlainInits, given.template get<std::string>()) == 0) {
          refuse(key);
        }
      } else if constexpr (!std::is_same_v<T, Unread>) {
        for (const auto& [pattern, each] : given.items()) {
          if constexpr (std::is_same_v<T, lora::ByPattern<int64_t>>) {
            value.emplace_back(pattern, rank_of(each));
          } else {
            value.emplace_back(pattern, each.template get<double>());
          }
        }
      }
    });
    return options;
  } catch (const Json::exception&) {
    throw IoError("{} is damaged: {} is missing, or has another type", path, at_key);
  }
}

namespace {

/// Throws unless the model's adapter and the adapter in the folder have the same scaling, both or neither are PiSSA, and the folder has all
/// tensors that train with the model's adapter.
void expect_alike(ConstModuleRef model, const fs::path& folder, const std::string& adapter) {
  lora::expect_unmerged(model);
  const auto theirs = read_adapter_config(folder);
  const auto weights = adapter_weights(folder);
  const auto stored = read_model(weights).tensors;
  for (const auto& layer : lora::layers_of(model, adapter)) {
    const auto numbers = [&](const lora::Options& options) {
      return std::pair(lora::rank_of(options, layer.name), lora::scaling_of(options, layer.name));
    };
    const auto own = numbers(lora::options_of(model, adapter)), there = numbers(theirs);
    if (own != there) {
      throw UsageError(
          "the adapter in {} has rank {} in '{}' and is multiplied by {}, but adapter '{}' of the model has rank {} and is multiplied by {}; "
          "apply it with the options of checkpoint::read_adapter_config",
          folder, there.first, layer.name, there.second, adapter, own.first, own.second);
    }
    for (const auto& part : kAdapterParts) {
      const auto matrix = stored.find(fmt::format("{}{}{}", kPrefix, layer.name, part.end));
      if (part.member == &lora::Weights::a && matrix != stored.end()) expect_rank(weights, layer.name, matrix->second.shape, theirs);
    }
  }
  const auto is_pissa = [](const lora::Options& options) { return options.init_lora_weights == lora::Init::Pissa; };
  if (is_pissa(theirs) != is_pissa(lora::options_of(model, adapter))) {
    throw UsageError(
        "the adapter in {} and adapter '{}' of the model are not made alike: only one of them was split off the weights "
        "(PiSSA); apply it with the options of checkpoint::read_adapter_config",
        folder, adapter);
  }
  for (const auto& [in_file, name] : names_in_file(model, adapter)) {
    // load_weights() throws if the adapter's own tensors are missing. For the biases of layers with adapters, older versions of peft wrote
    // names without `base_layer`.
    if (in_file.find(".lora_") != std::string::npos || stored.contains(in_file)) continue;
    if (!stored.contains(kPrefix + name))
      throw UsageError("the adapter in {} has no '{}', which trains with adapter '{}' of the model", folder, in_file, adapter);
  }
}

}  // namespace

void load_adapter(ModuleRef model, const fs::path& folder, const std::string& adapter) {
  const Calling calling("checkpoint::load_adapter");
  const auto failure = fmt::format("can't load the adapter in {}; nothing was changed", folder.string());
  all_or_none(world_of(*model).value_or(self_world()), {.unit = "adapter"}, failure, [&] { expect_alike(model, folder, adapter); });
  WeightsOptions options{
      .may_be_missing = {"(?!.*\\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\\." + adapter + "(\\.weight)?$).*"}};
  options.renamed = {{"^base_model\\.model\\.", ""},
                     {"\\.base_layer\\.", "."},
                     {"\\.(lora_[AB])\\.weight$", ".$1." + adapter + ".weight"},
                     {"\\.(lora_embedding_[AB])$", ".$1." + adapter},
                     {"\\.lora_magnitude_vector$", ".lora_magnitude_vector." + adapter + ".weight"}};
  load_weights(model, adapter_weights(folder), options);
}

PlainAdapter read_adapter(const fs::path& folder) {
  PlainAdapter adapter{.options = read_adapter_config(folder)};
  const auto path = adapter_weights(folder);
  const auto file = open_weights(folder);
  constexpr std::string_view kBefore = kPrefix;
  for (const auto& [name, tensor] : file.catalog().tensors) {
    const auto* part = std::ranges::find_if(kAdapterParts, [&](const AdapterPart& each) { return name.ends_with(each.end); });
    if (part == std::end(kAdapterParts) || !name.starts_with(kBefore) || name.size() <= kBefore.size() + part->end.size()) {
      adapter.others.push_back(name);
      continue;
    }
    auto& weights = adapter.layers[name.substr(kBefore.size(), name.size() - kBefore.size() - part->end.size())];
    weights.*(part->member) = file.read(name);
    weights.of_embedding |= part->of_embedding;
  }
  for (auto& [layer, weights] : adapter.layers) {
    if (!weights.a.defined() || !weights.b.defined())
      throw IoError("{} is damaged: it has one matrix of '{}' without the other", path, layer);
    if (adapter.options.use_dora && !weights.magnitude.defined())
      throw IoError("{} is damaged: it is a DoRA without the magnitudes of '{}'", path, layer);
    if (!adapter.options.use_dora && weights.magnitude.defined())
      throw IoError("{} is damaged: it has the magnitudes of a DoRA for '{}', but use_dora in {} is not true", path, layer, kAdapterConfig);
    weights.scaling = lora::scaling_of(adapter.options, layer);
    expect_rank(path, layer, weights.a.sizes(), adapter.options);
  }
  return adapter;
}

void expect_on_whole_base(const PlainAdapter& adapter, const fs::path& folder) {
  if (adapter.options.init_lora_weights != lora::Init::Pissa) return;
  throw UsageError(
      "the adapter in {} was split off the weights of the base (PiSSA), so it does not fit the whole base; load the model with the "
      "adapter, and merge it there with lora::merge",
      folder);
}

void write_adapter(const fs::path& folder, const PlainAdapter& adapter, const AdapterFile& about) {
  std::map<std::string, at::Tensor> values;
  for (const auto& [layer, weights] : adapter.layers) {
    for (const auto& part : kAdapterParts) {
      const auto& value = weights.*(part.member);
      const bool is_magnitude = part.member == &lora::Weights::magnitude;
      if (value.defined() && (is_magnitude || part.of_embedding == weights.of_embedding))
        values[fmt::format("{}{}{}", kPrefix, layer, part.end)] = value;
    }
  }
  write_files(folder, values, adapter.options, about);
}

namespace {

/// The output layer, and the embeddings that models of Hugging Face tie to it.
constexpr const char* kEnds[] = {"lm_head.weight", "embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight"};

/// An adapter in files, looked up by the names of the model's tensors that it changes.
class StoredAdapter {
 public:
  explicit StoredAdapter(const fs::path& folder) : adapter_(read_adapter(folder)), file_(open_weights(folder)) {
    expect_on_whole_base(adapter_, folder);
    left_.insert(adapter_.others.begin(), adapter_.others.end());
    for (const auto& [layer, weights] : adapter_.layers) left_.insert(layer);
  }

  /// Throws UsageError if the adapter's tensors for a tensor of the model do not fit its sizes.
  void expect_fit(const std::string& name, at::IntArrayRef sizes) {
    if (const auto whole = name_of_whole(name); !whole.empty()) {
      left_.erase(whole);
      const auto& there = file_.info(whole).shape;
      if (sizes != there) throw UsageError("'{}' is [{}] in the model, and [{}] in the adapter", name, joined(sizes), joined(there));
    }
    const auto* const weights = weights_of(name);
    if (weights == nullptr) return;
    left_.erase(layer_of(name));
    const auto &a = weights->a, &b = weights->b;
    const bool is_matrix = a.dim() > 1 && b.dim() > 1 && sizes.size() > 1;
    if (is_matrix && b.size(0) * a.flatten(1).size(1) == c10::multiply_integers(sizes) && b.numel() == b.size(0) * a.size(0) &&
        b.size(0) == sizes[weights->of_embedding ? 1 : 0])
      return;
    throw UsageError("'{}' is [{}] in the model, which the adapter, with [{}] and [{}], does not fit", name, joined(sizes),
                     joined(a.sizes()), joined(b.sizes()));
  }
  bool changes(const std::string& name) const { return weights_of(name) != nullptr; }
  /// Whether this tensor is an embedding or an output layer, and the adapter has matrices for it or replaces it whole.
  bool changes_end(const std::string& name) const {
    const auto* const weights = weights_of(name);
    const bool is_end = std::ranges::any_of(kEnds, [&](const char* end) { return nn::is_named(name, end); });
    return (weights != nullptr && weights->of_embedding) || (is_end && (changes(name) || !name_of_whole(name).empty()));
  }
  /// The layers and tensors of the adapter that have fitted no tensor of the model in expect_fit().
  const std::set<std::string>& left() const { return left_; }

  /// Returns a tensor of the model with the adapter merged into it; undefined if the adapter does not change it.
  at::Tensor merged(const std::string& name, c10::function_ref<at::Tensor()> read) const {
    const auto whole = name_of_whole(name);
    const auto value = whole.empty() ? at::Tensor() : file_.read(whole);
    const auto* const weights = weights_of(name);
    if (weights == nullptr) return value;
    auto wide = *weights;
    for (auto* const part : {&wide.a, &wide.b, &wide.magnitude}) {
      if (part->defined()) *part = part->to(at::kFloat);
    }
    return lora::merged((value.defined() ? value : read()).to(at::kFloat), wide);
  }

 private:
  static std::string layer_of(const std::string& name) { return name.substr(0, name.size() - kWeight.size()); }

  const lora::Weights* weights_of(const std::string& name) const {
    const auto found = name.ends_with(kWeight) ? adapter_.layers.find(layer_of(name)) : adapter_.layers.end();
    return found == adapter_.layers.end() ? nullptr : &found->second;
  }
  /// Returns the name in the adapter's file of the tensor that replaces the model's tensor `name`; empty if there is none.
  std::string name_of_whole(const std::string& name) const {
    const auto end = std::min(name.rfind('.'), name.size());
    for (auto in_file : {kPrefix + name, fmt::format("{}{}.base_layer{}", kPrefix, name.substr(0, end), name.substr(end))}) {
      if (file_.catalog().tensors.contains(in_file)) return in_file;
    }
    return {};
  }

  static constexpr std::string_view kWeight = ".weight";
  const PlainAdapter adapter_;
  const CatalogReader file_;
  std::set<std::string> left_;
};

bool is_plain(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

/// Whether the tensor has a second name, according to the files or to Hugging Face's config.json.
bool is_tied(const fs::path& base, const Catalog& catalog, const std::string& name) {
  if (std::ranges::any_of(catalog.aliases, [&](const auto& alias) { return alias.second == name; })) return true;
  const auto path = base / "config.json";
  if (!is_there(path)) return false;
  const auto config = Json::parse(InputFile(path).read_all(), nullptr, /*allow_exceptions=*/false);
  return config.is_object() && config.value("tie_word_embeddings", Json()) == true;
}

}  // namespace

std::vector<fs::path> merge_adapter(const fs::path& base, const fs::path& adapter, const fs::path& out, int64_t max_shard_size) {
  expect_writable_as(out, Format::Hub);
  StoredAdapter stored(adapter);
  const CatalogReader model(read_model(base));
  for (const auto& file : model.catalog().files) {
    std::error_code unknown;
    if (!is_hub_file(file.filename().string()) || !fs::equivalent(fs::absolute(file).parent_path(), out, unknown)) continue;
    throw UsageError("the model without the adapter is in {}, so a second call would merge the adapter again; write elsewhere", out);
  }
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : model.catalog().tensors)
    entries.push_back({.name = name, .dtype = tensor.dtype, .sizes = tensor.shape});
  sort_by_width(entries, [](const SafetensorsEntry& entry) { return entry.dtype; });
  for (const auto& entry : entries) stored.expect_fit(entry.name, entry.sizes);
  if (!stored.left().empty()) {
    throw UsageError("the adapter in {} is of another model than {}, which does not have: {}", adapter, base,
                     some_of({stored.left().begin(), stored.left().end()}));
  }
  for (const auto& entry : entries) {
    if (stored.changes(entry.name) && !is_plain(entry.dtype))
      throw UsageError("'{}' is {}, so {} is quantised, and an adapter can't be merged into it; merge into the model before quantisation",
                       entry.name, c10::toString(entry.dtype), base);
    if (!stored.changes_end(entry.name) || !is_tied(base, model.catalog(), entry.name)) continue;
    throw UsageError(
        "'{}' is both the embeddings and the output layer, and the adapter changes only one of them; merged into the weight it would "
        "change both. Use the adapter beside the model",
        entry.name);
  }
  auto metadata = model.catalog().aliases;
  metadata["format"] = "pt";
  metadata[kSaveKey] = std::to_string(std::random_device()());
  HubWriter writer(out, entries, metadata, max_shard_size);
  for (const auto& entry : entries) {
    const auto merged = stored.merged(entry.name, [&] { return model.read(entry.name); });
    writer.write(merged.defined() ? narrowed(merged, entry.dtype, entry.name).contiguous() : model.read(entry.name));
  }
  writer.close();
  return writer.files();
}

namespace {

std::set<std::string> parameters_of_adapters(ConstModuleRef model) {
  std::set<std::string> names;
  for (const auto& adapter : lora::adapters(model)) {
    for (const auto& layer : lora::layers_of(model, adapter)) {
      for (const auto& [kind, name] : layer.names) names.insert(name);
    }
  }
  return names;
}

const AddedAdapters added({.describe = lora::description,
                           .parameters = parameters_of_adapters,
                           .expect_unmerged = lora::expect_unmerged,
                           .save = [](ConstModuleRef model, const fs::path& folder, const Communicator& world) {
                             save_adapter(model, folder, world);
                           }});

}  // namespace

}  // namespace tessera::checkpoint
