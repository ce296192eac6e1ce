#include "tessera/shard/access/replaced_operator.h"

#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {
namespace {

/// Attached to weight.t(), which libtorch makes for one operator.
struct Transposed final : c10::BackendMeta {
  explicit Transposed(const at::Tensor& weight) : weight(weight) {}

  const at::Tensor weight;
};

const WeightMeta* replaced(const at::Tensor& weight) {
  const auto* const meta = weight_meta(weight);
  return meta != nullptr && meta->instead ? meta : nullptr;
}

}  // namespace

bool& runs_plainly() {
  static thread_local bool plainly = false;
  return plainly;
}

std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments) {
  if (runs_plainly()) return std::nullopt;
  if (const auto* const meta = replaced(weight)) {
    const auto instead = meta->instead;  // it may be replaced meanwhile
    return (*instead)(name, arguments);
  }
  const auto kept = weight.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const auto* const transposed = dynamic_cast<const Transposed*>(kept.get());
  if (transposed == nullptr) return std::nullopt;
  const bool has_bias = name == "aten::addmm";
  const c10::IValue linear[] = {arguments[has_bias ? 1 : 0], transposed->weight, has_bias ? arguments[0] : c10::IValue()};
  return replaced_operator(transposed->weight, "aten::linear", linear);
}

void note_transposed(const at::Tensor& weight, const at::Tensor& view) {
  if (replaced(weight) != nullptr) view.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Transposed>(weight));
}

bool keep_replaced(const at::Tensor& weight, const at::Tensor& values) {
  if (replaced(weight) == nullptr || unsharded_meta(weight) != nullptr) return false;
  if (!is_paged(values)) values.unsafeGetTensorImpl()->shallow_copy_from(paged_alias(values).getIntrusivePtr());
  return true;
}

}  // namespace tessera
