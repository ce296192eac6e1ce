#include "tessera/nn/attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/wide_products.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

constexpr int64_t kScoresAtOnce = int64_t{1} << 23;

/// Attention with a softcap, for {batch, heads, length, size}. No fused kernel has one.
struct CappedAttention : torch::autograd::Function<CappedAttention> {
  /// The queries [begin, begin + rows), with those of the heads that share keys one after the other: {batch, shared heads, group * rows,
  /// size}.
  struct Part {
    int64_t begin, rows, keys;  // the queries see the first `keys` keys
    at::Tensor queries, tanh, shares;
  };

  static void for_each_part(const at::Tensor& q, const at::Tensor& k, const GroupedAttention& options, const auto& act) {
    const auto batch = q.size(0), heads = q.size(1), all = k.size(2);
    const auto at_once = std::max<int64_t>(1, kScoresAtOnce / std::max<int64_t>(1, batch * heads * all));
    for (int64_t begin = 0; begin < q.size(2); begin += at_once) {
      Part part{.begin = begin, .rows = std::min(at_once, q.size(2) - begin), .keys = all, .queries = {}, .tanh = {}, .shares = {}};
      if (options.causal) part.keys = std::min(all, begin + part.rows);
      part.queries = rows_of_part(q, k, part);
      const auto products = part.queries.matmul(k.narrow(2, 0, part.keys).transpose(2, 3));
      part.tanh = (products.to(at::promoteTypes(q.scalar_type(), at::kFloat)) * (*options.scale / options.softcap)).tanh_();
      auto scores = (part.tanh * options.softcap).view({batch, heads, part.rows, part.keys});
      if (options.mask.defined()) {
        scores = scores + options.mask.narrow(2, begin, part.rows);
      } else if (options.causal) {
        const auto later = at::ones({part.rows, part.keys}, scores.options().dtype(at::kBool)).triu(begin + 1);
        scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
      }
      part.shares = scores.softmax(-1).to(q.scalar_type()).view(part.tanh.sizes());
      act(part);
    }
  }

  static at::Tensor rows_of_part(const at::Tensor& x, const at::Tensor& k, const Part& part) {
    return x.narrow(2, part.begin, part.rows).reshape({x.size(0), k.size(1), -1, x.size(3)});
  }

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const GroupedAttention& options) {
    context->save_for_backward({q, k, v, options.mask});
    context->saved_data["causal"] = options.causal;
    context->saved_data["scale"] = *options.scale;
    context->saved_data["softcap"] = options.softcap;
    std::vector<at::Tensor> parts;
    for_each_part(q, k, options, [&](const Part& part) {
      parts.push_back(part.shares.matmul(v.narrow(2, 0, part.keys)).view({q.size(0), q.size(1), part.rows, q.size(3)}));
    });
    return parts.empty() ? at::empty_like(q) : at::cat(parts, 2);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    if (c10::GradMode::is_enabled())
      throw UsageError("attention with a softcap can't be differentiated twice; call backward without create_graph");
    const auto saved = context->get_saved_variables();
    const auto &q = saved[0], &k = saved[1], &v = saved[2];
    const GroupedAttention options{.mask = saved[3],
                                   .causal = context->saved_data["causal"].toBool(),
                                   .scale = context->saved_data["scale"].toDouble(),
                                   .softcap = context->saved_data["softcap"].toDouble()};
    const auto of_k = at::zeros_like(k), of_v = at::zeros_like(v);
    std::vector<at::Tensor> of_q;
    for_each_part(q, k, options, [&](const Part& part) {
      const auto grad = rows_of_part(grads[0], k, part), keys = k.narrow(2, 0, part.keys);
      of_v.narrow(2, 0, part.keys).add_(part.shares.transpose(2, 3).matmul(grad));
      const auto of_shares = grad.matmul(v.narrow(2, 0, part.keys).transpose(2, 3)).to(part.tanh.scalar_type());
      const auto of_capped = (of_shares - (of_shares * part.shares).sum(-1, /*keepdim=*/true)) * part.shares;
      const auto of_products = (of_capped * (1 - part.tanh.square()) * *options.scale).to(q.scalar_type());
      of_q.push_back(of_products.matmul(keys).view({q.size(0), q.size(1), part.rows, q.size(3)}));
      of_k.narrow(2, 0, part.keys).add_(of_products.transpose(2, 3).matmul(part.queries));
    });
    return {of_q.empty() ? at::zeros_like(q) : at::cat(of_q, 2), of_k, of_v, {}};
  }
};

at::Tensor capped(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& mask, bool causal,
                  const GroupedAttention& options) {
  const auto scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(queries.size(3))));
  const GroupedAttention own{.mask = mask, .causal = causal, .scale = scale, .softcap = options.softcap};
  return CappedAttention::apply(queries, keys, values, own).transpose(1, 2).flatten(2);
}

/// Computes attention with each head of keys and values as a batch entry of its own, so that the query heads of its group share it without
/// a copy. Sizes are those of grouped_attention().
at::Tensor unmasked(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, bool causal,
                    const GroupedAttention& options) {
  if (options.softcap > 0) return capped(queries, keys, values, {}, causal, options);
  const auto batch = queries.size(0), heads = queries.size(1), length = queries.size(2), size = queries.size(3);
  const auto shared = keys.size(1), groups = heads / shared;
  const auto for_groups = [&](const at::Tensor& x) { return x.flatten(0, 1).unsqueeze(1).expand({-1, groups, -1, -1}); };
  const auto mixed = at::scaled_dot_product_attention(queries.reshape({batch * shared, groups, length, size}), for_groups(keys),
                                                      for_groups(values), {}, options.dropout, causal, options.scale);
  return mixed.view({batch, shared, groups, length, size}).permute({0, 3, 1, 2, 4}).reshape({batch, length, heads * size});
}

at::Tensor masked(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  const auto mask = options.mask.to(queries.scalar_type());
  if (options.softcap > 0) return capped(queries, keys, values, mask, /*causal=*/false, options);
  const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(queries.size(1) / x.size(1), 1); };
  const auto mixed = at::scaled_dot_product_attention(queries, repeated(keys), repeated(values), mask, options.dropout,
                                                      /*is_causal=*/false, options.scale);
  return mixed.transpose(1, 2).flatten(2);
}

at::Tensor by_document(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                       const GroupedAttention& options) {
  const auto& documents = *options.documents;
  std::vector<at::Tensor> rows;
  const auto of_rows = [](const at::Tensor& x) { return x.split(1, 0); };
  const auto q = of_rows(queries), k = of_rows(keys), v = of_rows(values);
  for (size_t row = 0; row < documents.size(); row++) {
    const auto of_documents = [&](const at::Tensor& x) { return x.split_with_sizes(documents[row], 2); };
    const auto own_q = of_documents(q[row]), own_k = of_documents(k[row]), own_v = of_documents(v[row]);
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < own_q.size(); i++) parts.push_back(unmasked(own_q[i], own_k[i], own_v[i], /*causal=*/true, options));
    rows.push_back(at::cat(parts, 1));
  }
  return at::cat(rows, 0);
}

void expect_fit(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  const bool fits = queries.dim() == 4 && keys.dim() == 4 && keys.sizes() == values.sizes() && keys.size(0) == queries.size(0) &&
                    keys.size(1) > 0 && queries.size(1) % keys.size(1) == 0 && keys.size(3) == queries.size(3);
  if (!fits)
    throw UsageError("grouped_attention: queries of [{}], keys of [{}] and values of [{}] don't belong together", joined(queries.sizes()),
                     joined(keys.sizes()), joined(values.sizes()));
  if (options.softcap > 0 && options.dropout > 0) throw UsageError("grouped_attention: dropout can't be set with a softcap");
  const auto* const documents = options.documents;
  if (options.mask.defined() && (options.causal || documents != nullptr))
    throw UsageError("grouped_attention: a mask alone decides which keys queries see, so {} can't be set with it; put it into the mask",
                     documents != nullptr ? "documents" : "causal");
  if (documents == nullptr) return;
  if (std::ssize(*documents) != queries.size(0))
    throw UsageError("grouped_attention: documents of {} rows for a batch of {}", documents->size(), queries.size(0));
  for (size_t row = 0; row < documents->size(); row++) {
    const auto& lengths = (*documents)[row];
    const auto all = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    if (all != queries.size(2) || all != keys.size(2) || std::ranges::any_of(lengths, [](int64_t length) { return length < 0; }))
      throw UsageError("grouped_attention: row {} has documents of {} tokens, for {} queries and {} keys", row, joined(lengths, " + "),
                       queries.size(2), keys.size(2));
  }
}

}  // namespace

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options) : options(options) {
  if (options.width <= 0 || options.heads <= 0 || options.width % options.heads != 0) {
    throw UsageError("self attention: a width of {} can't be divided among {} heads", options.width, options.heads);
  }
  qkv = register_module("qkv", torch::nn::Linear(options.width, 3 * options.width));
  out = register_module(options.name_of_out, torch::nn::Linear(options.width, options.width));
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& x) {
  const auto batch = x.size(0), length = x.size(1);
  // Parted before heads are moved, the three gradients need one copy to become that of qkv.
  const auto parts = linear(qkv, x).view({batch, length, 3, options.heads, options.width / options.heads}).unbind(2);
  const auto by_head = [&](size_t i) { return parts[i].transpose(1, 2); };
  const auto mixed = at::scaled_dot_product_attention(by_head(0), by_head(1), by_head(2), {}, /*dropout_p=*/0.0, options.causal);
  return linear(out, mixed.transpose(1, 2).reshape({batch, length, options.width}));
}

PreNormLayer::PreNormLayer(const SelfAttentionOptions& options, double eps)
    : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}).eps(eps)))),
      norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}).eps(eps)))),
      attention(register_module("attention", SelfAttention(options))),
      up(register_module("up", torch::nn::Linear(options.width, 4 * options.width))),
      down(register_module("down", torch::nn::Linear(4 * options.width, options.width))) {}

at::Tensor PreNormLayer::forward(const at::Tensor& x) {
  const auto attended = x + attention(norm1(x));
  return attended + linear(down, at::gelu(linear(up, norm2(attended))));
}

at::Tensor grouped_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  expect_fit(queries, keys, values, options);
  if (queries.is_cpu() && multiplies_slowly(queries.scalar_type())) return wide_attention(queries, keys, values, options);
  if (options.mask.defined()) return masked(queries, keys, values, options);
  if (options.documents != nullptr && queries.size(0) > 0) return by_document(queries, keys, values, options);
  return unmasked(queries, keys, values, options.causal, options);
}

at::Tensor wide_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kFloat); };
  return grouped_attention(wide(queries), wide(keys), wide(values), options).to(queries.scalar_type());
}

}  // namespace tessera::nn
