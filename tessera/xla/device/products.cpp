// Matrix products and convolutions, embeddings, and operators that put tensors together.
#include <ATen/WrapDimUtils.h>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::plus;

Value product(const Value& a, const Value& b) { return hlo::dot(a, b, {{}, {}, {a.rank() - 1}, {b.rank() - 2}}); }

Value batched(const Value& a, const Value& b) { return hlo::dot(a, b, {{0}, {0}, {2}, {1}}); }

Value scaled(const Value& value, double factor) {
  return factor == 1 ? value : hlo::binary("multiply", value, hlo::full(factor, value.type()));
}

/// beta * bias + alpha * product.
void give_sum(Call& call, const Value& product) {
  const auto type = call.result_type();
  const double beta = call.number(3), alpha = call.number(4);
  auto result = scaled(product, alpha);
  if (beta != 0) result = plus(scaled(hlo::expand(call.value(0, product.element()), result.sizes()), beta), result);
  call.give(hlo::convert(result, type));
}

void mm(Call& call) { call.give(product(call.value(0), call.value(1))); }
void bmm(Call& call) { call.give(batched(call.value(0), call.value(1))); }
void addmm(Call& call) { give_sum(call, product(call.value(1), call.value(2))); }
void baddbmm(Call& call) { give_sum(call, batched(call.value(1), call.value(2))); }
void addmv(Call& call) { give_sum(call, hlo::dot(call.value(1), call.value(2), {{}, {}, {1}, {0}})); }
void dot(Call& call) { call.give(hlo::dot(call.value(0), call.value(1), {{}, {}, {0}, {0}})); }

void cat(Call& call) {
  std::vector<Value> parts;
  const auto tensors = call[0].toTensorVector();
  const auto type = call.result_type();
  int64_t rank = 0;
  for (const auto& tensor : tensors) rank = std::max(rank, tensor.dim());
  for (const auto& tensor : tensors) {
    if (tensor.dim() == 1 && tensor.numel() == 0 && rank != 1) continue;  // of old programs: an empty list fits anywhere
    parts.push_back(hlo::convert(read(tensor), type));
  }
  if (parts.empty()) parts.push_back(hlo::convert(read(tensors[0]), type));
  call.give(hlo::concatenate(parts, at::maybe_wrap_dim(call.integer(1), std::max<int64_t>(rank, 1))));
}

void embedding(Call& call) { call.give(hlo::take(call.value(0), call.value(1, at::kLong), 0)); }

void embedding_gradient(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  auto g = call.value(0, type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type);
  const auto places = call.value(1, at::kLong);
  const auto rows = call.integer(2), padding = call.integer(3), width = g.sizes().back();
  if (padding >= 0) {
    const auto keep = hlo::compare("NE", places, hlo::broadcast(hlo::constant(padding, at::kLong), places.sizes(), {}));
    Sizes order(places.sizes().size());
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    g = hlo::select(hlo::broadcast(keep, g.sizes(), order), g, hlo::full(0, g.type()));
  }
  const auto zeros = hlo::broadcast(hlo::constant(0.0, g.element()), {rows, width}, {});
  call.give(hlo::convert(hlo::put(zeros, places, g, Combine::Add), type));
}

const Kernel kProducts[] = {
    {"mm.out", mm},
    {"bmm.out", bmm},
    {"addmm.out", addmm},
    {"baddbmm.out", baddbmm},
    {"addmv.out", addmv},
    {"dot", dot},
    {"vdot", dot},
    {"cat.out", cat},
    {"embedding", embedding},
    {"embedding_dense_backward", embedding_gradient},
};

}  // namespace

void register_products() { add_kernels(kProducts); }

}  // namespace tessera::xla
