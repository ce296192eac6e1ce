#include "tessera/shard/access/replaced_operator.h"

#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/weight_forms.h"

namespace tessera {
namespace {

/// Attached to weight.t(), which libtorch makes for one operator.
struct Transposed final : c10::BackendMeta {
  explicit Transposed(const at::Tensor& weight) : weight(weight) {}

  const at::Tensor weight;
};

/// The record of a weight whose operators are replaced, or that is held in another form; else null.
const WeightMeta* special(const at::Tensor& weight) {
  const auto* const meta = weight_meta(weight);
  return meta != nullptr && (meta->instead || meta->held.defined()) ? meta : nullptr;
}

/// The weight whose weight.t() this view is; undefined for any other tensor.
at::Tensor transposed(const at::Tensor& view) {
  const auto kept = view.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const auto* const known = dynamic_cast<const Transposed*>(kept.get());
  return known == nullptr ? at::Tensor() : known->weight;
}

}  // namespace

bool& runs_plainly() {
  static thread_local bool plainly = false;
  return plainly;
}

bool has_stand_in(const at::Tensor& weight) {
  return special(weight) != nullptr;
}

std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments) {
  if (const auto* const meta = special(weight)) {
    const auto instead = meta->instead;  // a copy, because the call may replace it
    if (instead && !runs_plainly()) {
      if (auto result = (*instead)(name, arguments)) return result;
    }
    if (!meta->held.defined() || !meta->form->instead) return std::nullopt;
    (void)meta->requires_grad();  // throws if somebody has set it
    return meta->form->instead(name, arguments, meta->held);
  }
  const auto whole = transposed(weight);
  if (!whole.defined()) return std::nullopt;
  const bool has_bias = name == "aten::addmm";
  if (!has_bias && name != "aten::matmul" && name != "aten::mm") return std::nullopt;  // linear(x, weight.t()) is another product
  // Factors of the bias and of the product.
  const auto beta = has_bias ? arguments[3].toScalar() : c10::Scalar(1), alpha = has_bias ? arguments[4].toScalar() : c10::Scalar(1);
  const bool is_linear = beta.equal(1) && alpha.equal(1);
  const c10::IValue linear[] = {arguments[has_bias ? 1 : 0], whole, has_bias && is_linear ? arguments[0] : c10::IValue()};
  auto result = replaced_operator(whole, "aten::linear", linear);
  return result && !is_linear ? arguments[0].toTensor() * beta + *result * alpha : result;
}

void note_transposed(const at::Tensor& weight, const at::Tensor& view) {
  if (special(weight) != nullptr) view.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Transposed>(weight));
}

bool is_only_replaced(const at::Tensor& weight) {
  const auto* const meta = special(weight);
  return meta != nullptr && !meta->held.defined() && unsharded_meta(weight) == nullptr;
}

void keep_replaced(const at::Tensor& values) {
  if (!is_paged(values)) values.unsafeGetTensorImpl()->shallow_copy_from(paged_alias(values).getIntrusivePtr());
}

at::Tensor decoded(const at::Tensor& weight) {
  if (const auto* const meta = special(weight)) return meta->held.defined() ? meta->form->decode(meta->held, meta->form->dtype) : at::Tensor();
  const auto whole = transposed(weight);
  const auto values = whole.defined() ? decoded(whole) : at::Tensor();
  return values.defined() ? values.t() : values;
}

}  // namespace tessera
