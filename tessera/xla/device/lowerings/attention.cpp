// Scaled dot-product attention as one operator: its gradient computes the scores again, so that they need not be kept in memory.
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>

#include <cmath>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

/// Chooses the operator of this file if it supports the arguments, and otherwise libtorch's composition of other operators.
int64_t choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
               double dropout, bool /*causal*/, std::optional<double> /*scale*/, bool grouped) {
  const bool plain = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(1) == key.size(1) && query.size(0) == key.size(0);
  const bool fixed_mask = !mask || !mask->defined() || !mask->requires_grad();
  return static_cast<int64_t>(plain && fixed_mask && dropout == 0 && !grouped ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

/// Merges batches and heads into one dimension.
Value by_head(const Value& x) {
  return reshape(x, {x.size(0) * x.size(1), x.size(2), x.size(3)});
}

struct Inputs {
  Value q, k, v, bias;
  int64_t batches;
  double scale;
  bool causal;

  /// Reads query, key and value from argument `first` on. The other parameters are indices of arguments, too.
  Inputs(const Call& call, size_t first, size_t bias_at, size_t dropout_at, size_t scale_at)
      : q(by_head(call.value(first))),
        k(by_head(call.value(first + 1))),
        v(by_head(call.value(first + 2))),
        bias(call.has(bias_at) ? call.value(bias_at) : Value()),
        batches(call.tensor(first).size(0)),
        scale(call.has(scale_at) ? call.number(scale_at) : 1 / std::sqrt(static_cast<double>(q.size(2)))),
        causal(call.flag(dropout_at + 1)) {
    if (call.number(dropout_at) != 0) throw NotLowered();
  }
};

enum class Rows { Queries, Keys };

/// The scaled and masked scores in full precision. Rows::Keys transposes them: then only one of the gradient's four products has a
/// transposed left operand, which is slow on CPUs.
Value scores_of(const Inputs& in, Rows rows) {
  const bool transposed = rows == Rows::Keys;
  auto scores = dot(transposed ? in.k : in.q, transposed ? in.q : in.k, {{0}, {0}, {2}, {2}}, hlo::wide(in.q.element()));
  scores = scores * in.scale;
  if (in.bias) {
    const auto& q = in.q.sizes();
    auto added = expand(convert(in.bias, scores.element()), {in.batches, q[0] / in.batches, q[1], in.k.size(1)});
    added = reshape(added, {q[0], q[1], in.k.size(1)});
    scores = scores + (transposed ? transpose(added, {0, 2, 1}) : added);
  }
  if (!in.causal) return scores;
  const Type places{at::kInt, {scores.size(1), scores.size(2)}};
  const auto query = hlo::iota(places, transposed ? 1 : 0), key = hlo::iota(places, transposed ? 0 : 1);
  const auto seen = broadcast(key <= query, scores.sizes(), {1, 2});
  return select(seen, scores, -std::numeric_limits<double>::infinity());
}

void attention(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  const Inputs in(call, 0, 3, 4, 7);
  const auto scores = scores_of(in, Rows::Queries);
  // A query that sees no key gets zero weights: the lower limits on maximum and sum keep its result finite.
  const auto found = maximum(scores, {2});
  const auto highest = largest(found, -1e30);
  const auto weights = exponential(scores - broadcast(highest, scores.sizes(), {0, 1}));
  const auto added = hlo::sum(weights, {2});
  const auto sum = largest(added, 1e-37);
  auto mixed = dot(convert(weights, type), in.v, {{0}, {0}, {2}, {1}}, scores.element());
  mixed = mixed / broadcast(sum, mixed.sizes(), {0, 1});
  Sizes result = call.tensor(0).sizes().vec(), rows(result.begin(), result.end() - 1);
  result.back() = in.v.size(2);
  call.give({reshape(convert(mixed, type), result), reshape(highest + logarithm(sum), rows)});
}

void attention_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const Inputs in(call, 1, 4, 12, 16);
  const auto g = by_head(call.value(0)), out = by_head(call.value(6));
  const auto scores = scores_of(in, Rows::Keys);
  const auto element = scores.element();
  const auto of_query = [&](const Value& each) { return broadcast(reshape(each, {in.q.size(0), in.q.size(1)}), scores.sizes(), {0, 2}); };
  const auto weights = exponential(scores - of_query(call.value(7)));
  const auto along = hlo::sum(convert(g, element) * convert(out, element), {2});
  const auto of_weights = dot(in.v, g, {{0}, {0}, {2}, {2}}, element);
  auto of_scores = weights * (of_weights - of_query(along));
  of_scores = convert(of_scores * in.scale, type);
  const auto give_shape = [&](const Value& value, size_t like) { return reshape(convert(value, type), call.tensor(like).sizes()); };
  call.give({give_shape(dot(of_scores, in.k, {{0}, {0}, {1}, {1}}, element), 1),
             give_shape(dot(of_scores, in.q, {{0}, {0}, {2}, {1}}, element), 2),
             give_shape(dot(convert(weights, type), g, {{0}, {0}, {2}, {1}}, element), 3)});
}

}  // namespace

void register_attention() {
  add_kernels({
      {"_scaled_dot_product_fused_attention_overrideable", attention},
      {"_scaled_dot_product_fused_attention_overrideable_backward", attention_gradient},
  });
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choice);
}

}  // namespace tessera::xla
