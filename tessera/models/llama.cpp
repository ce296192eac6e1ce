#include "tessera/models/llama.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/swiglu.h"

namespace tessera::models {
namespace {

using torch::nn::Linear;

nn::RmsNorm make_norm(int64_t size, const LlamaConfig& config) {
  return nn::RmsNorm(size, config.rms_norm_eps, config.is_gemma() ? 1 : 0);
}

/// As in transformers, the embedding of padding gets no gradient from inputs; a tied head may still give it one.
torch::nn::EmbeddingOptions embedding_options(const LlamaConfig& config) {
  return torch::nn::EmbeddingOptions(config.vocab_size, config.hidden_size).padding_idx(config.pad_token_id);
}

double rounded_to(at::ScalarType dtype, double value) {
  const auto number = static_cast<float>(value);
  if (dtype == at::kBFloat16) return c10::BFloat16(number);
  if (dtype == at::kHalf) return c10::Half(number);
  return value;
}

/// Returns the mask that is added to attention scores, {1 or batch, 1, queries, keys}: 0 for keys that the queries at these places see,
/// -inf for others. `documents`: the document of each token, or undefined.
at::Tensor mask_of(const at::Tensor& places, int64_t keys, std::optional<int64_t> window, const at::Tensor& documents,
                   at::ScalarType dtype) {
  const auto from = places.unsqueeze(1), to = at::arange(keys, places.options()).unsqueeze(0);
  auto seen = to <= from;
  if (window) seen = seen & (to > from - *window);
  seen = seen.unsqueeze(0).unsqueeze(0);
  if (documents.defined()) seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1);
  return at::zeros(seen.sizes(), places.options().dtype(dtype)).masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
}

/// Returns the lengths of the documents in each row; empty if each row is one document.
std::vector<std::vector<int64_t>> lengths_of(const at::Tensor& positions) {
  std::vector<std::vector<int64_t>> rows;
  bool several = false;
  const auto all = positions.to(at::kLong).contiguous();
  for (int64_t row = 0; row < all.size(0); row++) {
    const auto* places = all.const_data_ptr<int64_t>() + row * all.size(1);
    auto& lengths = rows.emplace_back();
    for (int64_t i = 0; i < all.size(1); i++) {
      if (i == 0 || places[i] == 0) lengths.push_back(0);
      lengths.back()++;
    }
    several = several || lengths.size() > 1;
  }
  return several ? rows : std::vector<std::vector<int64_t>>();
}

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config, int64_t layer)
    : layer(layer),
      head_size(config.head_size()),
      rotates(config.rotates(layer)),
      slides(config.slides(layer)),
      dropout(config.attention_dropout),
      softcap(config.attn_logit_softcapping.value_or(0)) {
  const auto queries = config.num_attention_heads * head_size, keys = config.key_value_heads() * head_size;
  widths = {queries, keys, keys};
  if (config.query_pre_attn_scalar) scale = 1 / std::sqrt(static_cast<double>(*config.query_pre_attn_scalar));
  const auto make = [&](const char* name, int64_t outputs) {
    return register_module(name, make_linear(config.hidden_size, outputs, config.biases_heads(), config));
  };
  if (config.fuses_projections()) {
    qkv_proj = make("qkv_proj", queries + 2 * keys);
  } else {
    q_proj = make("q_proj", queries);
    k_proj = make("k_proj", keys);
    v_proj = make("v_proj", keys);
  }
  o_proj = register_module("o_proj", make_linear(queries, config.hidden_size, config.attention_bias, config));
  if (!config.norms_heads()) return;
  q_norm = register_module("q_norm", make_norm(head_size, config));
  k_norm = register_module("k_norm", make_norm(head_size, config));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& states, const std::shared_ptr<const LlamaPass>& pass) {
  std::vector<at::Tensor> fused;
  if (!qkv_proj.is_empty()) fused = nn::linear(qkv_proj, states).split_with_sizes(widths, 2);
  const auto heads_of = [&](size_t part, const Linear& projection, const nn::RmsNorm& norm) {
    const auto heads = (fused.empty() ? nn::linear(projection, states) : fused[part]).unflatten(2, {-1, head_size});
    return norm.is_empty() ? heads : call(norm, heads);
  };
  const auto& table = slides && pass->local_table.cos.defined() ? pass->local_table : pass->table;
  const auto placed = [&](const at::Tensor& heads) { return rotates ? nn::rotary(heads, table) : heads.transpose(1, 2).contiguous(); };
  const auto queries = placed(heads_of(0, q_proj, q_norm));
  auto keys = placed(heads_of(1, k_proj, k_norm)), values = heads_of(2, v_proj, nullptr).transpose(1, 2).contiguous();
  if (auto* cache = pass->cache) {
    auto& kept = cache->layers_[static_cast<size_t>(layer)];
    const auto append = [&](at::Tensor& all, at::Tensor& added) {
      const auto before = cache->length_, room = all.defined() ? all.size(2) : 0, needed = before + added.size(2);
      if (needed > room) {
        // Doubles the room, so that few copies are made. Devices that compile steps have all of it from the beginning.
        const auto grown = pass->places.defined() ? cache->longest_ : std::min(cache->longest_, std::max(needed, 2 * room));
        const auto larger = at::zeros({added.size(0), added.size(1), grown, added.size(3)}, added.options());
        if (before > 0) larger.narrow(2, 0, before).copy_(all.narrow(2, 0, before));
        all = larger;
      }
      if (pass->places.defined()) {
        added = all.index_copy_(2, pass->places, added);
      } else {
        all.narrow(2, before, added.size(2)).copy_(added);
        added = all.narrow(2, 0, needed);
      }
    };
    append(kept.keys, keys);
    append(kept.values, values);
  }
  const auto& mask = slides ? pass->sliding_mask : pass->mask;
  return nn::linear(o_proj, nn::grouped_attention(queries, keys, values,
                                                  {.mask = mask,
                                                   .causal = !mask.defined() && queries.size(2) > 1,
                                                   .documents = mask.defined() || pass->documents.empty() ? nullptr : &pass->documents,
                                                   .dropout = is_training() ? dropout : 0,
                                                   .scale = scale,
                                                   .softcap = softcap}));
}

LlamaMLPImpl::LlamaMLPImpl(const LlamaConfig& config) : is_gemma(config.is_gemma()) {
  const auto make = [&](const char* name, int64_t inputs, int64_t outputs) {
    return register_module(name, make_linear(inputs, outputs, config.mlp_bias, config));
  };
  if (config.fuses_projections()) {
    gate_up_proj = make("gate_up_proj", config.hidden_size, 2 * config.intermediate_size);
  } else {
    gate_proj = make("gate_proj", config.hidden_size, config.intermediate_size);
    up_proj = make("up_proj", config.hidden_size, config.intermediate_size);
  }
  down_proj = make("down_proj", config.intermediate_size, config.hidden_size);
}

at::Tensor LlamaMLPImpl::forward(const at::Tensor& states) {
  if (!gate_up_proj.is_empty()) {
    const auto parts = nn::linear(gate_up_proj, states).chunk(2, 2);
    return nn::linear(down_proj, nn::swiglu(parts[0], parts[1]));
  }
  const auto gate = nn::linear(gate_proj, states), up = nn::linear(up_proj, states);
  return nn::linear(down_proj, is_gemma ? nn::geglu(gate, up) : nn::swiglu(gate, up));
}

LlamaDecoderLayerImpl::LlamaDecoderLayerImpl(const LlamaConfig& config, int64_t layer)
    : input_layernorm(register_module("input_layernorm", make_norm(config.hidden_size, config))),
      post_attention_layernorm(register_module("post_attention_layernorm", make_norm(config.hidden_size, config))),
      self_attn(register_module("self_attn", LlamaAttention(config, layer))) {
  if (config.has_experts(layer)) {
    experts = register_module(config.model_type == "mixtral" ? "block_sparse_moe" : "mlp", LlamaExperts(config, layer));
  } else {
    mlp = register_module("mlp", LlamaMLP(config));
  }
  if (!config.is_gemma()) return;
  pre_feedforward_layernorm = register_module("pre_feedforward_layernorm", make_norm(config.hidden_size, config));
  post_feedforward_layernorm = register_module("post_feedforward_layernorm", make_norm(config.hidden_size, config));
}

at::Tensor LlamaDecoderLayerImpl::forward(const at::Tensor& states, const std::shared_ptr<const LlamaPass>& pass) {
  if (!pre_feedforward_layernorm.is_empty()) {
    const auto attended = states + post_attention_layernorm(self_attn(input_layernorm(states), pass));
    return attended + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(attended)));
  }
  const auto attended = states + self_attn(input_layernorm(states), pass);
  const auto normalised = post_attention_layernorm(attended);
  return attended + (mlp.is_empty() ? experts(normalised, pass->router_scores) : mlp(normalised));
}

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& config)
    : config(expect_sense(config)),
      embed_tokens(register_module("embed_tokens", torch::nn::Embedding(embedding_options(config)))),
      layers(register_module("layers", torch::nn::ModuleList())),
      norm(register_module("norm", make_norm(config.hidden_size, config))) {
  torch::nn::init::normal_(embed_tokens->weight, 0, config.initializer_range);
  if (config.pad_token_id) {
    const torch::NoGradGuard no_grad;
    embed_tokens->weight.select(0, *config.pad_token_id).zero_();
  }
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) layers->push_back(LlamaDecoderLayer(config, layer));
}

at::Tensor LlamaModelImpl::forward(const at::Tensor& tokens, const LlamaInput& input) {
  const auto length = tokens.size(1), before = input.cache == nullptr ? 0 : input.cache->length_, all = before + length;
  if (input.cache != nullptr && input.positions.defined())
    throw UsageError("LlamaInput: positions and cache exclude each other; give one of them");
  if (input.cache != nullptr && all > input.cache->longest_)
    throw UsageError("a text of {} tokens does not fit a LlamaCache for {}; make a longer cache", all, input.cache->longest_);
  if (all > config.max_position_embeddings)
    throw UsageError("a text of {} tokens is longer than this model's max_position_embeddings, {}", all, config.max_position_embeddings);
  if (input.cache != nullptr && config.rope.longrope) {
    auto& seen = input.cache->tokens_;
    seen = seen.defined() ? at::cat({seen, tokens}, 1) : tokens;
    // From the first token beyond the original length on, all tokens have other angles, so that their keys are computed again.
    const auto original = config.rope.longrope->original_max_position_embeddings;
    if (before > 0 && before <= original && all > original) {
      input.cache->length_ = 0;
      return forward(std::exchange(seen, at::Tensor()), input).narrow(1, before, length);
    }
  }
  const auto pass = std::make_shared<LlamaPass>();
  // On devices that compile steps, the whole cache is read, and places are inputs from the host, so that every later token runs the same
  // program.
  const bool reads_whole = input.cache != nullptr && !tokens.device().is_cpu() && !tokens.device().is_cuda();
  const auto host_or_device = reads_whole ? c10::Device(at::kCPU) : tokens.device();
  const auto places = at::arange(before, all, tokens.options().dtype(at::kLong).device(host_or_device)).to(tokens.device());
  if (reads_whole) pass->places = places;
  const auto positions = input.positions.defined() ? input.positions : places.unsqueeze(0);
  pass->table = nn::rotary_table(config.rope, config.head_size(), positions);
  if (config.rope_local_base_freq)
    pass->local_table = nn::rotary_table({.theta = *config.rope_local_base_freq}, config.head_size(), positions);
  auto states = embed_tokens(tokens);
  const auto scale = [&] {
    if (config.is_gemma()) states = states * rounded_to(states.scalar_type(), std::sqrt(static_cast<double>(config.hidden_size)));
  };
  const bool scales_last = config.model_type == "gemma2";  // as in transformers, where the embeddings of Gemma 3 scale themselves
  if (!scales_last) scale();
  if (is_training() && neftune_alpha > 0) {
    const auto most = neftune_alpha / std::sqrt(static_cast<double>(length * config.hidden_size));
    states = states + at::empty_like(states).uniform_(-most, most);
  }
  if (scales_last) scale();
  const bool knows = input.positions.defined() && input.positions.device().is_cpu();
  if (knows) pass->documents = lengths_of(input.positions);
  const bool has_documents = input.positions.defined() && (!knows || !pass->documents.empty());
  const auto documents = has_documents ? (input.positions == 0).cumsum(1) : at::Tensor();
  // One text without a cache needs no mask, and neither do documents whose lengths are known.
  const bool several_after_others = before > 0 && length > 1;
  const auto keys = reads_whole ? input.cache->longest_ : all;
  const auto mask = [&](std::optional<int64_t> window) { return mask_of(places, keys, window, documents, states.scalar_type()); };
  if ((has_documents && !knows) || several_after_others || reads_whole) pass->mask = mask({});
  const bool slides = config.sliding_window.value_or(keys) < keys;
  pass->sliding_mask = slides ? mask(config.sliding_window) : pass->mask;
  pass->cache = input.cache;
  pass->router_scores = input.router_scores;
  if (pass->router_scores) pass->router_scores->assign(static_cast<size_t>(config.num_hidden_layers), {});
  if (input.cache != nullptr) input.cache->layers_.resize(static_cast<size_t>(config.num_hidden_layers));
  for (const auto& layer : *layers) states = call(layer->as<LlamaDecoderLayer>(), states, std::shared_ptr<const LlamaPass>(pass));
  if (input.cache != nullptr) input.cache->length_ = all;
  return norm(states);
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config) : model(register_module("model", LlamaModel(config))) {
  if (!config.tie_word_embeddings)
    lm_head = register_module("lm_head", make_linear(config.hidden_size, config.vocab_size, /*bias=*/false, config));
}

at::Tensor LlamaForCausalLMImpl::forward(const at::Tensor& tokens, const LlamaInput& input) {
  return scores(call(model, tokens, input));
}

at::Tensor LlamaForCausalLMImpl::scores(const at::Tensor& states) {
  const auto scores = lm_head.is_empty() ? at::linear(states, model->embed_tokens->weight) : nn::linear(lm_head, states);
  return nn::softcapped(scores, model->config.final_logit_softcapping.value_or(0));
}

at::Tensor LlamaForCausalLMImpl::loss(const at::Tensor& tokens, const at::Tensor& targets, const nn::LinearCrossEntropy& options,
                                      const LlamaInput& input) {
  if (const auto& experts = model->config.experts; experts && experts->output_router_logits && !input.router_scores) {
    auto with_scores = input;
    with_scores.router_scores = std::make_shared<std::vector<at::Tensor>>();
    const auto own = loss(tokens, targets, options, with_scores);
    return own + experts->router_aux_loss_coef * balance_loss(*with_scores.router_scores, *experts, input.counted).to(own.scalar_type());
  }
  return entropy(nn::linear_cross_entropy, call(model, tokens, input), targets, options);
}

at::Tensor LlamaForCausalLMImpl::losses(const at::Tensor& tokens, const at::Tensor& targets, const nn::LinearCrossEntropy& options,
                                        const LlamaInput& input) {
  return losses_of(call(model, tokens, input), targets, options);
}

at::Tensor LlamaForCausalLMImpl::losses_of(const at::Tensor& states, const at::Tensor& targets, const nn::LinearCrossEntropy& options) {
  return entropy(nn::linear_cross_entropies, states, targets, options);
}

at::Tensor LlamaForCausalLMImpl::entropy(Entropy* entropy, const at::Tensor& states, const at::Tensor& targets,
                                         const nn::LinearCrossEntropy& options) {
  auto capped = options;
  if (model->config.final_logit_softcapping) capped.softcap = *model->config.final_logit_softcapping;
  if (lm_head.is_empty()) return entropy(states, model->embed_tokens->weight, targets, capped);
  const auto of_head = [&](const torch::nn::LinearImpl& head, const at::Tensor& x) { return entropy(x, head.weight, targets, capped); };
  return call_with(lm_head, of_head, states);
}

std::vector<std::string> LlamaForCausalLMImpl::surplus_names() const {
  std::vector<std::string> names = {".*rotary_emb\\.inv_freq"};
  if (lm_head.is_empty()) names.emplace_back("lm_head\\.weight");
  return names;
}

}  // namespace tessera::models
