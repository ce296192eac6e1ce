// Matrix products, embeddings, and operators that put tensors together.
#include <ATen/ExpandUtils.h>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using Element = std::optional<at::ScalarType>;

Value product(const Value& a, const Value& b, Element result = {}) {
  return dot(a, b, {{}, {}, {a.rank() - 1}, {b.rank() - 2}}, result);
}

Value batched(const Value& a, const Value& b, Element result = {}) {
  return dot(a, b, {{0}, {0}, {2}, {1}}, result);
}

/// Multiplies a value by alpha or beta, the argument `factor`.
Value by_factor(const Call& call, size_t factor, const Value& value) {
  return call.is_one(factor) ? value : value * like(value, call.number(factor));
}

/// The type in which a product of half types stays until the bias is added, so that the sum is rounded once.
at::ScalarType unrounded(const Call& call) {
  return hlo::wide(call.tensor(1).scalar_type());
}

/// Gives beta * bias + alpha * product. If beta is 0, the bias is ignored, even if it is NaN.
void give_sum(Call& call, const Value& product) {
  const auto type = call.result_type();
  TORCH_CHECK(at::is_expandable_to(call.tensor(0).sizes(), product.sizes()), "expected the tensor that is added to a product of sizes ",
              product.sizes(), " to have these sizes or to expand to them, got ", call.tensor(0).sizes());
  auto result = by_factor(call, 4, product);
  if (call.number(3) != 0) result = by_factor(call, 3, expand(call.value(0, product.element()), result.sizes())) + result;
  call.give(convert(result, type));
}

/// Throws if the operands of a product have different types, because libtorch converts none.
void check_types(const Call& call) {
  for (size_t i = 1; i < call.arguments() && call[i].isTensor(); i++) {
    TORCH_CHECK(call.tensor(i).scalar_type() == call.tensor(0).scalar_type(), "expected matrices and vectors of one dtype, got ",
                call.tensor(0).scalar_type(), " and ", call.tensor(i).scalar_type());
  }
}

Lowering typed(void (*lower)(Call& call)) {
  return [lower](Call& call) {
    check_types(call);
    lower(call);
  };
}

void mm(Call& call) {
  call.give(product(call.value(0), call.value(1)));
}
void bmm(Call& call) {
  call.give(batched(call.value(0), call.value(1)));
}
void addmm(Call& call) {
  give_sum(call, product(call.value(1), call.value(2), unrounded(call)));
}
void baddbmm(Call& call) {
  give_sum(call, batched(call.value(1), call.value(2), unrounded(call)));
}
void addmv(Call& call) {
  give_sum(call, dot(call.value(1), call.value(2), {{}, {}, {1}, {0}}, unrounded(call)));
}
void dot(Call& call) {
  TORCH_CHECK(call.tensor(0).dim() == 1 && call.tensor(0).sizes() == call.tensor(1).sizes(), "dot: expected two 1-D tensors of one size, got ",
              call.tensor(0).sizes(), " and ", call.tensor(1).sizes());
  call.give(dot(call.value(0), call.value(1), {{}, {}, {0}, {0}}));
}

void cat(Call& call) {
  std::vector<Value> parts;
  const auto tensors = call[0].toTensorVector();
  const auto type = call.result_type();
  int64_t rank = 0;
  for (const auto& tensor : tensors) rank = std::max(rank, tensor.dim());
  for (const auto& tensor : tensors) {
    if (tensor.dim() == 1 && tensor.numel() == 0 && rank != 1) continue;  // as in libtorch, an empty 1-D tensor fits anywhere
    parts.push_back(convert(read(tensor), type));
  }
  if (parts.empty()) parts.push_back(convert(read(tensors[0]), type));
  call.give(concatenate(parts, wrapped(call.integer(1), rank)));
}

void embedding(Call& call) {
  const auto &weight = call.tensor(0), &places = call.tensor(1);
  TORCH_CHECK(weight.dim() == 2, "embedding: 'weight' must be 2-D, got ", weight.dim());
  TORCH_CHECK(places.scalar_type() == at::kLong || places.scalar_type() == at::kInt, "embedding: indices must be Long or Int, got ",
              places.scalar_type());
  call.give(take(call.value(0), call.value(1, at::kLong), 0));
}

void embedding_gradient(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  auto g = call.value(0, hlo::wide(type));
  const auto places = call.value(1, at::kLong);
  const auto rows = call.integer(2), padding = call.integer(3), width = g.sizes().back();
  if (padding >= 0) {
    const auto keep = compare("NE", places, padding);
    g = select(broadcast(keep, g.sizes(), all_dimensions(places.rank())), g, 0);
  }
  if (call.flag(4)) {  // divides by how often the batch names each row
    const auto none = hlo::filled(0, {g.element(), {rows}});
    const auto counts = put(none, places, hlo::filled(1, {g.element(), places.sizes()}), Combine::Add);
    g = g / broadcast(take(counts, places, 0), g.sizes(), all_dimensions(places.rank()));
  }
  const auto zeros = hlo::filled(0, {g.element(), {rows, width}});
  call.give(convert(put(zeros, places, g, Combine::Add), type));
}

}  // namespace

void register_products() {
  add_kernels({
      {"mm.out", typed(mm)},
      {"bmm.out", typed(bmm)},
      {"addmm.out", typed(addmm)},
      {"baddbmm.out", typed(baddbmm)},
      {"addmv.out", typed(addmv)},
      {"dot vdot", typed(dot)},
      {"cat.out", cat},
      {"embedding", embedding},
      {"embedding_dense_backward", embedding_gradient},
  });
}

}  // namespace tessera::xla
