#include "tessera/models/experts.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "tessera/nn/linear.h"
#include "tessera/nn/swiglu.h"
#include "tessera/shard/some_ranks.h"

namespace tessera::models {

torch::nn::Linear make_linear(int64_t inputs, int64_t outputs, bool bias, const LlamaConfig& config) {
  torch::nn::Linear linear(torch::nn::LinearOptions(inputs, outputs).bias(bias));
  torch::nn::init::normal_(linear->weight, 0, config.initializer_range);
  if (bias) torch::nn::init::zeros_(linear->bias);
  return linear;
}

LlamaExpertImpl::LlamaExpertImpl(const LlamaConfig& config, int64_t intermediate_size) {
  const bool is_mixtral = config.model_type == "mixtral";
  const auto linear = [&](const char* name, const char* in_mixtral, int64_t inputs, int64_t outputs) {
    return register_module(is_mixtral ? in_mixtral : name, make_linear(inputs, outputs, /*bias=*/false, config));
  };
  gate_proj = linear("gate_proj", "w1", config.hidden_size, intermediate_size);
  up_proj = linear("up_proj", "w3", config.hidden_size, intermediate_size);
  down_proj = linear("down_proj", "w2", intermediate_size, config.hidden_size);
}

at::Tensor LlamaExpertImpl::forward(const at::Tensor& states) {
  return nn::linear(down_proj, nn::swiglu(nn::linear(gate_proj, states), nn::linear(up_proj, states)));
}

LlamaExpertsImpl::LlamaExpertsImpl(const LlamaConfig& config, int64_t layer)
    : layer(layer),
      options(*config.experts),
      gate(register_module("gate", make_linear(config.hidden_size, options.num_experts, /*bias=*/false, config))),
      experts(register_module("experts", torch::nn::ModuleList())) {
  for (int64_t i = 0; i < options.num_experts; i++) experts->push_back(LlamaExpert(config, options.intermediate_size));
  if (options.shared_expert_intermediate_size == 0) return;
  shared_expert = register_module("shared_expert", LlamaExpert(config, options.shared_expert_intermediate_size));
  shared_expert_gate = register_module("shared_expert_gate", make_linear(config.hidden_size, 1, /*bias=*/false, config));
}

at::Tensor LlamaExpertsImpl::forward(const at::Tensor& states, const RouterScores& scores) {
  const auto rows = nn::rows_of(states), own = nn::linear(gate, rows);
  // A layer that runs again in backward leaves the scores of its forward alone.
  if (scores && !scores->at(static_cast<size_t>(layer)).defined()) scores->at(static_cast<size_t>(layer)) = own;
  auto [weights, chosen] = own.softmax(-1, at::kFloat).topk(options.num_experts_per_tok, -1);
  if (options.norm_topk_prob) weights = weights / weights.sum(-1, /*keepdim=*/true);
  weights = weights.to(rows.scalar_type());
  at::Tensor shared;
  if (!shared_expert.is_empty()) {
    const auto share = at::sigmoid(nn::linear(shared_expert_gate, rows));
    shared = shared_expert(rows) * share;
  }
  at::Tensor sum;
  if (rows.is_cpu() || rows.is_cuda()) {
    sum = by_expert(rows, weights, chosen);
  } else {
    const auto of_expert = at::zeros_like(own, rows.options()).scatter(1, chosen, weights).unbind(1);
    for (size_t i = 0; i < of_expert.size(); i++) {
      const auto added = call((*experts)[i]->as<LlamaExpert>(), rows) * of_expert[i].unsqueeze(1);
      sum = sum.defined() ? sum + added : added;
    }
  }
  return (shared.defined() ? sum + shared : sum).view_as(states);
}

/// `weights` and `chosen`: {tokens, num_experts_per_tok}.
at::Tensor LlamaExpertsImpl::by_expert(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& chosen) {
  const auto flat = chosen.flatten(), order = flat.argsort(/*stable=*/true, 0, /*descending=*/false);
  const auto own = at::zeros({options.num_experts}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
  const auto counts = at::stack({own, rows_on_all_ranks(*experts, own)}).cpu();  // the only wait for a device
  const auto* const count = counts.const_data_ptr<int64_t>();
  const auto token = order.div(options.num_experts_per_tok, "floor");
  const auto parts = rows.index_select(0, token).split_with_sizes({count, static_cast<size_t>(options.num_experts)});
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < parts.size(); i++) {
    if (count[parts.size() + i] > 0) results.push_back(call((*experts)[i]->as<LlamaExpert>(), parts[i]));
  }
  const auto result = at::cat(results) * weights.flatten().index_select(0, order).unsqueeze(1);
  return at::zeros_like(rows).index_add(0, token, result);
}

at::Tensor balance_loss(const std::vector<at::Tensor>& scores, const ExpertOptions& options, const at::Tensor& counted) {
  std::vector<at::Tensor> of_layers;
  for (const auto& each : scores) {
    if (each.defined()) of_layers.push_back(each);
  }
  if (of_layers.empty()) return at::zeros({});
  const auto all = at::cat(of_layers).softmax(-1);
  const auto chosen = std::get<1>(all.topk(options.num_experts_per_tok, -1));
  const auto choices = at::zeros_like(all, at::kFloat).scatter_(1, chosen, 1);
  const auto mean = [&](const at::Tensor& values) {
    if (!counted.defined()) return values.mean(0);
    const auto weights = counted.flatten().repeat(static_cast<int64_t>(of_layers.size())).to(values.scalar_type());
    return weights.matmul(values) / weights.sum();
  };
  return (mean(choices) * mean(all)).sum() * options.num_experts;
}

}  // namespace tessera::models
