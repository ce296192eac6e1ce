#include "tessera/llm/gguf_adapter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/data/pattern.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/gguf_parts.h"
#include "tessera/models/config_file.h"
#include "tessera/models/llama.h"
#include "tessera/shard/deferred_init.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using checkpoint::GgufFile;
using checkpoint::PlainAdapter;
using lora::Weights;
using models::LlamaConfig;

constexpr auto kEmbedding = "model.embed_tokens", kHead = "lm_head";
constexpr auto kTask = "CAUSAL_LM";  // the task of every model that llama.cpp runs
constexpr auto kType = "adapter.type", kLora = "lora", kAlpha = "adapter.lora.alpha", kTokens = "adapter.alora.invocation_tokens";
constexpr auto kHeads = ".attention.head_count", kSharedHeads = ".attention.head_count_kv";
constexpr std::string_view kWeight = ".weight", kA = ".lora_a", kB = ".lora_b", kBaseLayer = ".base_layer.weight";

int64_t rank_of(const Weights& weights) {
  return weights.b.size(1);
}

bool fit_together(const Weights& weights) {
  return weights.a.dim() == 2 && weights.b.dim() == 2 && weights.a.size(0) == rank_of(weights) && rank_of(weights) > 0;
}

/// Throws UsageError unless each layer with an adapter is in a model of this shape, and fits it.
void expect_fit(const PlainAdapter& adapter, const LlamaConfig& config, const fs::path& path, const fs::path& base) {
  const auto model = deferred_init([&] { return models::LlamaForCausalLM(config); });
  const auto parameters = model->named_parameters();
  for (const auto& [layer, weights] : adapter.layers) {
    const auto* weight = parameters.find(layer + ".weight");
    if (weight == nullptr || weight->dim() != 2)
      throw UsageError("the adapter in {} is of another model than {}, which has no layer '{}' for it", path, base, layer);
    const auto rows = weight->size(weights.of_embedding ? 1 : 0), columns = weight->size(weights.of_embedding ? 0 : 1);
    if (!fit_together(weights) || weights.b.size(0) != rows || weights.a.size(1) != columns)
      throw UsageError("'{}' is [{}] in {}, which the adapter in {}, with [{}] and [{}], does not fit", layer, joined(weight->sizes()),
                       base, path, joined(weights.a.sizes()), joined(weights.b.sizes()));
  }
}

/// Throws ConfigError, with the reason and a way out, for an adapter that llama.cpp would refuse, or apply in part.
void expect_gguf_place(const PlainAdapter& adapter, const LlamaConfig& config, const fs::path& folder) {
  const auto refuse = [&](const std::string& why, const char* way_out) {
    throw ConfigError("{} can't become a GGUF file: {}; {}", folder, why, way_out);
  };
  constexpr auto kMerge =
      "merge it into the model (tessera ckpt merge-adapter MODEL ADAPTER OUT), and write that (tessera ckpt convert OUT FILE --to gguf)";
  const bool is_dora = std::ranges::any_of(adapter.layers, [](const auto& layer) { return layer.second.magnitude.defined(); });
  if (is_dora || adapter.options.use_dora) refuse("DoRA (use_dora) has no place there", kMerge);
  checkpoint::expect_on_whole_base(adapter, folder);
  for (const auto& name : adapter.others) {
    // peft writes frozen weights of embeddings, too.
    if (!name.ends_with(kBaseLayer)) refuse(fmt::format("'{}' has no place there, because it is not a LoRA matrix", name), kMerge);
  }
  for (const auto& [layer, weights] : adapter.layers) {
    if (checkpoint::number_of_expert(layer)) refuse(fmt::format("'{}' is an adapter of an expert", layer), kMerge);
  }
  for (const auto* layer : {kEmbedding, kHead}) {
    if (config.tie_word_embeddings && adapter.layers.contains(layer))
      refuse(fmt::format("'{}' has an adapter, but llama.cpp takes no adapter for embeddings that are also the output head", layer),
             "train without this one, or on a base whose head is not tied to the embeddings");
  }
  if (adapter.layers.empty()) refuse("no layer has an adapter", "train one first");
}

/// Returns the alpha of a layer's adapter. llama.cpp scales by alpha / r, where r is the rank of the adapter.
float alpha_of(const Weights& weights) {
  return static_cast<float>(weights.scaling * static_cast<double>(rank_of(weights)));
}

template <class Value>
Value most_frequent(const std::vector<Value>& values, Value otherwise) {
  std::map<Value, int64_t> counts;
  for (const auto& value : values) counts[value]++;
  const auto most = std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; });
  return most == counts.end() ? otherwise : most->first;
}

/// Returns the alpha of a GGUF file, which has one for all layers: the alpha that most layers have.
float alpha_of(const PlainAdapter& adapter) {
  std::vector<float> alphas;
  for (const auto& [layer, weights] : adapter.layers) alphas.push_back(alpha_of(weights));
  std::erase(alphas, 0.0F);  // llama.cpp takes 0 for a missing alpha, and multiplies by 1
  return most_frequent(alphas, 1.0F);
}

lora::Options options_of(const std::map<std::string, Weights>& layers, double alpha) {
  std::vector<int64_t> ranks;
  for (const auto& [layer, weights] : layers) ranks.push_back(rank_of(weights));
  lora::Options options{.r = most_frequent(ranks, int64_t{1})};
  const auto alpha_for = [&](int64_t r) { return alpha != 0 ? alpha : static_cast<double>(r); };
  options.lora_alpha = alpha_for(options.r);
  for (const auto& [layer, weights] : layers) {
    options.layers.target_modules.push_back(layer);
    const auto r = rank_of(weights);
    if (r != options.r) options.rank_pattern.insert(options.rank_pattern.end(), {data::escaped_pattern(layer), r});
    if (alpha_for(r) != options.lora_alpha)
      options.alpha_pattern.insert(options.alpha_pattern.end(), {data::escaped_pattern(layer), alpha_for(r)});
  }
  return options;
}

struct Heads {
  std::optional<int64_t> queries = {}, keys = {};
};

/// Returns a matrix B with its rows in peft's order.
at::Tensor without_pairs(const at::Tensor& b, const std::string& layer, const GgufFile& file, const Heads& heads) {
  constexpr int64_t kUnknown = -1;
  const auto queries = heads.queries.value_or(kUnknown);
  const auto in_pairs = checkpoint::heads_in_pairs(file.architecture(), layer + ".", queries, heads.keys.value_or(queries));
  if (in_pairs == 0) return b;
  if (in_pairs == kUnknown)
    throw ConfigError(
        "{} does not say how many heads the model has, without which the rows of '{}' can't be put back into their order; give the "
        "model, too (--base)",
        file.path(), layer);
  if (in_pairs < 0 || b.size(0) < in_pairs || b.size(0) % (2 * in_pairs) != 0)
    throw IoError("{}: the {} rows of '{}' can't be divided into {} heads", file.path(), b.size(0), layer, in_pairs);
  return checkpoint::rows_of_gguf(b, in_pairs);
}

std::map<std::string, Weights> layers_of(const GgufFile& file, const Heads& heads) {
  std::map<std::string, Weights> layers;
  const auto architecture = file.architecture();
  for (const auto& tensor : file.tensors()) {
    const std::string_view name = tensor.name;
    const bool is_a = name.ends_with(kA), is_known = is_a || name.ends_with(kB);
    const std::string of_weight(is_known ? name.substr(0, name.size() - kA.size()) : "");
    const auto weight = checkpoint::name_of_gguf(architecture, of_weight);
    if (!weight || checkpoint::number_of_expert(*weight) || !weight->ends_with(kWeight) || tensor.sizes.size() != 2)
      throw ConfigError("{}: '{}' has no place in an adapter of peft, because it is not a LoRA matrix of a known layer", file.path(), name);
    const auto layer = weight->substr(0, weight->size() - kWeight.size());
    auto& weights = layers[layer];
    weights.of_embedding = layer == kEmbedding;
    const auto value = checkpoint::read_gguf_tensor(file, tensor.name);
    if (is_a) {
      weights.a = weights.of_embedding ? value.t().contiguous() : value;
    } else {
      weights.b = without_pairs(value, layer, file, heads);
    }
  }
  for (const auto& [layer, weights] : layers) {
    if (!weights.a.defined() || !weights.b.defined() || !fit_together(weights))
      throw IoError("{} is damaged: the two matrices of '{}' don't fit together", file.path(), layer);
  }
  return layers;
}

}  // namespace

bool is_adapter(const fs::path& path) {
  if (!is_there(path)) return false;
  if (is_folder(path)) return is_there(path / checkpoint::kAdapterConfig) && !is_there(path / models::kConfigFile);
  return checkpoint::is_gguf_file(path) && GgufFile(path).is_adapter();
}

void write_gguf_adapter(const fs::path& folder, const fs::path& file, const fs::path& base) {
  for (const auto& in : {folder, base}) checkpoint::expect_outside(file, in);
  if (is_there(file) && !is_adapter(file)) throw UsageError("{} is there already, and is not an adapter; write to another file", file);
  const auto config = read_config(base);
  const auto adapter = checkpoint::read_adapter(folder);
  expect_gguf_place(adapter, config, folder);
  expect_fit(adapter, config, folder, base);
  const auto alpha = alpha_of(adapter);
  const auto architecture = architecture_of(config);
  auto metadata = general(config, "adapter", name_of_folder(folder), 0);
  metadata.emplace_back(kType, text(kLora));
  metadata.emplace_back(kAlpha, f32(alpha));
  metadata.emplace_back(architecture + kHeads, u32(config.num_attention_heads));  // read by write_peft_adapter()
  metadata.emplace_back(architecture + kSharedHeads, u32(config.key_value_heads()));
  std::vector<checkpoint::GgufTensor> tensors;
  std::vector<at::Tensor> values;
  const auto add = [&](const std::string& name, const at::Tensor& value) {
    tensors.push_back({.name = name, .sizes = value.sizes().vec(), .code = checkpoint::find_block_code("F32")});
    values.push_back(value);
  };
  for (const auto& [layer, weights] : adapter.layers) {
    const auto own = alpha_of(weights);
    const auto b = own == alpha ? weights.b : weights.b.to(at::kDouble) * (static_cast<double>(own) / static_cast<double>(alpha));
    const auto heads = checkpoint::heads_in_pairs(architecture, layer + ".", config.num_attention_heads, config.key_value_heads());
    const auto name = checkpoint::gguf_name(architecture, layer + ".weight").value();
    add(name + ".lora_a", weights.of_embedding ? weights.a.t() : weights.a);  // llama.cpp takes one row per token
    add(name + ".lora_b", heads > 0 ? checkpoint::rows_for_gguf(b, heads) : b);
  }
  checkpoint::GgufWriter writer(file, metadata, tensors);
  for (const auto& value : values) writer.write(value);
  writer.close();
}

void write_peft_adapter(const fs::path& file, const fs::path& folder, const fs::path& base) {
  checkpoint::expect_outside(folder, file);
  if (is_adapter(folder))
    throw UsageError("{} has an adapter already, which may be the one that was trained; write to another folder", folder);
  checkpoint::expect_no_model(folder);
  const GgufFile stored(file);
  if (!stored.is_adapter()) throw ConfigError("{} is not an adapter: its general.type is not 'adapter'", file);
  if (const auto type = stored.text(kType).value_or(""); type != kLora)
    throw ConfigError("{}: {}: '{}' is not read here, only '{}'", file, kType, type, kLora);
  if (stored.find(kTokens) != nullptr)
    throw ConfigError("{}: {} is not read here: such an adapter acts only after certain tokens", file, kTokens);
  const auto architecture = known_architecture(stored);
  Heads heads{.queries = stored.integer(architecture + kHeads), .keys = stored.integer(architecture + kSharedHeads)};
  std::optional<LlamaConfig> config;
  if (!base.empty()) {
    config = read_config(base);
    if (architecture_of(*config) != architecture)
      throw UsageError("the adapter in {} is for the architecture '{}', and {} is of another", file, architecture, base);
    heads = {.queries = config->num_attention_heads, .keys = config->key_value_heads()};
  }
  PlainAdapter adapter{.layers = layers_of(stored, heads)};
  if (config) expect_fit(adapter, *config, file, base);
  adapter.options = options_of(adapter.layers, as_meant(stored.number(kAlpha).value_or(0)));
  checkpoint::write_adapter(folder, adapter, {.base = base.string(), .task_type = kTask});
}

}  // namespace tessera::llm
