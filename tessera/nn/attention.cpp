#include "tessera/nn/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/wide_products.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

/// Computes attention with each head of keys and values as a batch entry of its own, so that the query heads of its group share it without
/// a copy. Sizes are those of grouped_attention().
at::Tensor unmasked(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, bool causal, double dropout) {
  const auto batch = queries.size(0), heads = queries.size(1), length = queries.size(2), size = queries.size(3);
  const auto shared = keys.size(1), groups = heads / shared;
  const auto for_groups = [&](const at::Tensor& x) { return x.flatten(0, 1).unsqueeze(1).expand({-1, groups, -1, -1}); };
  const auto mixed = at::scaled_dot_product_attention(queries.reshape({batch * shared, groups, length, size}), for_groups(keys),
                                                      for_groups(values), {}, dropout, causal);
  return mixed.view({batch, shared, groups, length, size}).permute({0, 3, 1, 2, 4}).reshape({batch, length, heads * size});
}

at::Tensor masked(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& mask, double dropout) {
  const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(queries.size(1) / x.size(1), 1); };
  const auto mixed = at::scaled_dot_product_attention(queries, repeated(keys), repeated(values), mask.to(queries.scalar_type()), dropout);
  return mixed.transpose(1, 2).flatten(2);
}

at::Tensor by_document(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                       const std::vector<std::vector<int64_t>>& documents, double dropout) {
  std::vector<at::Tensor> rows;
  const auto of_rows = [](const at::Tensor& x) { return x.split(1, 0); };
  const auto q = of_rows(queries), k = of_rows(keys), v = of_rows(values);
  for (size_t row = 0; row < documents.size(); row++) {
    const auto of_documents = [&](const at::Tensor& x) { return x.split_with_sizes(documents[row], 2); };
    const auto own_q = of_documents(q[row]), own_k = of_documents(k[row]), own_v = of_documents(v[row]);
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < own_q.size(); i++) parts.push_back(unmasked(own_q[i], own_k[i], own_v[i], /*causal=*/true, dropout));
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
  if (options.mask.defined()) return masked(queries, keys, values, options.mask, options.dropout);
  if (options.documents != nullptr && queries.size(0) > 0) return by_document(queries, keys, values, *options.documents, options.dropout);
  return unmasked(queries, keys, values, options.causal, options.dropout);
}

at::Tensor wide_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kFloat); };
  return grouped_attention(wide(queries), wide(keys), wide(values), options).to(queries.scalar_type());
}

}  // namespace tessera::nn
