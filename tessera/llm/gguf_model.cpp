#include "tessera/llm/gguf_model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/llm/gguf_parts.h"
#include "tessera/models/config_file.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using checkpoint::GgufTensor;
using checkpoint::kLongFactors;
using checkpoint::kRopeFactors;
using checkpoint::kShortFactors;
using models::LlamaConfig;

/// Throws ConfigError, with a way out, unless the path is a folder or a GGUF file.
void expect_model_place(const fs::path& path) {
  if (is_folder(path)) return;
  if (!is_there(path))
    throw ConfigError(
        "{}: there is no such folder or GGUF file; for a model on the Hugging Face Hub, give the folder that it was downloaded to", path);
  if (checkpoint::is_gguf_file(path)) return;
  const auto folder = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  const bool has_config = is_there(folder / "config.json");
  throw ConfigError("{} is not a GGUF file; give {}", path,
                    has_config ? "its folder, " + folder.string() : "one, or a folder with config.json and tokenizer.json");
}

/// Returns the text of config.json with another dtype of weights.
std::string with_dtype(const std::string& text, at::ScalarType dtype) {
  auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return text;
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = models::name_in_config(dtype);
  return json.dump(2) + "\n";
}

const checkpoint::BlockCode* code_named(const std::string& name) {
  const auto* code = checkpoint::find_block_code(name);
  if (code == nullptr || code->encode == nullptr)
    throw UsageError("GGUF files are written as F32, F16, BF16, Q8_0, Q5_0, Q4_0 or Q4_K, not as '{}'", name);
  return code;
}

/// Returns the code for a tensor. `code` is the one that GgufOptions chooses for matrices.
const checkpoint::BlockCode* code_of(const std::string& name, const std::vector<int64_t>& sizes, const checkpoint::BlockCode* code,
                                     bool tied) {
  if (name.find("ffn_gate_inp") != std::string::npos) return code_named("F32");  // a router
  const bool is_output = name == "output.weight" || (tied && name == "token_embd.weight");
  std::vector<const checkpoint::BlockCode*> candidates = {is_output && code->bytes < code->values ? code_named("Q8_0") : code};
  if (candidates.front()->name == "Q4_K") candidates.push_back(code_named("Q5_0"));
  for (const auto* each : candidates) {
    if (sizes.size() > 1 && sizes.back() % each->values == 0) return each;
  }
  return code_named("F32");
}

}  // namespace

LlamaConfig read_config(const fs::path& path) {
  expect_model_place(path);
  return is_folder(path) ? LlamaConfig::read(path) : config_in_gguf(path);
}

data::Tokenizer read_tokenizer(const fs::path& path) {
  expect_model_place(path);
  return is_folder(path) ? data::Tokenizer::read(path) : tokenizer_in_gguf(path);
}

void write_gguf(const fs::path& folder, const fs::path& file, const GgufOptions& options) {
  const auto* code = code_named(options.code);
  if (!is_there(folder / models::kConfigFile))
    throw ConfigError(
        "a GGUF file is made of a Hugging Face folder, but {} has no config.json. `tessera ckpt convert IN FOLDER --to hub` makes such a "
        "folder of a GGUF file, and a recipe's --output makes one of a run",
        folder);
  const auto* plain = code_named("F32");
  const auto config = LlamaConfig::read(folder);
  const auto tokenizer = data::Tokenizer::read(folder);
  auto name_of_model = options.name.empty() ? name_of_folder(folder) : options.name;
  if (config.model_type == "phi3" && !is_phi3(name_of_model)) name_of_model = "Phi-3 " + name_of_model;
  expect_gguf_place(config, tokenizer, folder);
  const checkpoint::CatalogReader stored(checkpoint::read_model(folder));
  const auto architecture = architecture_of(config);
  auto metadata = general(config, "model", name_of_model, code->file_type);
  add_config(metadata, config);
  add_tokenizer(metadata, tokenizer, config);
  std::vector<GgufTensor> tensors;
  std::vector<std::vector<std::string>> names;  // of each tensor: one, or those of the experts that it stacks
  std::map<std::string, size_t> stacks;
  std::vector<at::Tensor> factors;
  const auto add_factors = [&](const char* name, const at::Tensor& values) {
    tensors.push_back({.name = name, .sizes = values.sizes().vec(), .code = plain});
    factors.push_back(values);
  };
  if (config.rope.llama3) add_factors(kRopeFactors, rope_factors(config));
  if (config.rope.longrope) {
    add_factors(kLongFactors, at::tensor(config.rope.longrope->long_factor, at::kFloat));
    add_factors(kShortFactors, at::tensor(config.rope.longrope->short_factor, at::kFloat));
  }
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (name.ends_with("rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight")) continue;
    const auto known = checkpoint::gguf_name(architecture, name);
    if (!known) throw ConfigError("{}: '{}' has no place in a GGUF file of {}", folder, name, config.model_type);
    if (checkpoint::number_of_expert(name)) {
      const auto [stack, is_new] = stacks.try_emplace(*known, names.size());
      if (!is_new) {
        names[stack->second].push_back(name);
        continue;
      }
    }
    tensors.push_back({.name = *known, .sizes = tensor.shape, .code = code_of(*known, tensor.shape, code, config.tie_word_embeddings)});
    names.push_back({name});
  }
  const auto before = tensors.size() - names.size();
  for (const auto& [stack, i] : stacks) {
    if (std::ssize(names[i]) != config.experts->num_experts)
      throw ConfigError("{}: '{}' is there for {} experts of {}", folder, stack, names[i].size(), config.experts->num_experts);
    std::ranges::sort(names[i], {}, [](const std::string& name) { return std::pair(name.size(), name); });  // by number
    auto& sizes = tensors[before + i].sizes;
    sizes.insert(sizes.begin(), config.experts->num_experts);
  }
  checkpoint::GgufWriter writer(file, metadata, tensors);
  for (const auto& values : factors) writer.write(values);
  for (const auto& some : names) {
    if (checkpoint::number_of_expert(some.front())) {
      std::vector<at::Tensor> experts;
      for (const auto& name : some) experts.push_back(stored.read(name));
      writer.write(at::stack(experts));
      continue;
    }
    const auto& name = some.front();
    const auto heads = checkpoint::heads_in_pairs(architecture, name, config.num_attention_heads, config.key_value_heads());
    auto values = stored.read(name);
    if (checkpoint::has_one_added(architecture, name)) values = values.to(at::kFloat) + 1;
    writer.write(heads > 0 ? checkpoint::rows_for_gguf(values, heads) : values);
  }
  writer.close();
}

bool has_description(const fs::path& model) {
  return is_folder(model) ? is_there(model / models::kConfigFile) : is_there(model) && checkpoint::is_gguf_file(model);
}

at::ScalarType dtype_of_weights(const fs::path& model) {
  std::map<at::ScalarType, int64_t> values;
  for (const auto& [name, tensor] : checkpoint::read_model(model).tensors) values[tensor.dtype] += c10::multiply_integers(tensor.shape);
  const auto most = std::ranges::max_element(values, {}, [](const auto& each) { return each.second; });
  return most == values.end() ? at::kFloat : most->first;
}

void write_description(const fs::path& model, const fs::path& folder, std::optional<at::ScalarType> dtype) {
  if (!is_folder(model)) {
    const auto config = config_in_gguf(model);
    const auto tokenizer = tokenizer_in_gguf(model);
    config.write(folder, dtype ? *dtype : dtype_of_weights(model));
    return tokenizer.write(folder);
  }
  make_folder(folder);
  const auto config = InputFile(model / models::kConfigFile).read_all();
  write_text(folder / models::kConfigFile, dtype ? with_dtype(config, *dtype) : config);
  for (const auto& [name, text] : data::files_in(model)) write_text(folder / name, text);
}

void write_hub(const fs::path& file, const fs::path& folder) {
  checkpoint::convert(file, folder, {.to = checkpoint::Format::Hub});
  write_description(file, folder);
}

}  // namespace tessera::llm
