#include "tessera/shard/access/weight_operator.h"

#include <memory>
#include <utility>

#include "tessera/shard/storage/paged_tensor.h"

namespace tessera {
namespace {

/// It stays with the tensor when the memory of that comes and goes.
struct WeightMeta final : c10::BackendMeta {
  explicit WeightMeta(std::shared_ptr<const WeightOperator> instead, at::Tensor transposed = {})
      : instead(std::move(instead)), transposed(std::move(transposed)) {}

  const std::shared_ptr<const WeightOperator> instead;
  const at::Tensor transposed;  // the weight of which this one is a view
};

const WeightMeta* meta_of(const at::Tensor& weight) {
  return dynamic_cast<const WeightMeta*>(weight.unsafeGetTensorImpl()->get_backend_meta());
}

thread_local bool runs_plainly = false;

}  // namespace

void replace_weight_operator(const at::Tensor& weight, WeightOperator instead) {
  auto* const impl = weight.unsafeGetTensorImpl();
  if (!instead) {
    if (meta_of(weight) != nullptr) impl->set_backend_meta(nullptr);
    return;
  }
  // Operators on a weight that is not sharded have to come to paging, too.
  if (!is_paged(weight)) impl->shallow_copy_from(paged_alias(weight).getIntrusivePtr());
  impl->set_backend_meta(c10::make_intrusive<WeightMeta>(std::make_shared<const WeightOperator>(std::move(instead))));
}

PlainOperators::PlainOperators() : before_(std::exchange(runs_plainly, true)) {}

PlainOperators::~PlainOperators() {
  runs_plainly = before_;
}

std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments) {
  const auto* const meta = runs_plainly ? nullptr : meta_of(weight);
  if (meta == nullptr) return std::nullopt;
  const auto instead = meta->instead;  // it may be replaced meanwhile
  if (!meta->transposed.defined()) return (*instead)(name, arguments);
  const bool has_bias = name == "aten::addmm";
  const c10::IValue linear[] = {arguments[has_bias ? 1 : 0], meta->transposed, has_bias ? arguments[0] : c10::IValue()};
  return (*instead)("aten::linear", linear);
}

void note_transposed(const at::Tensor& weight, const at::Tensor& view) {
  const auto* const meta = meta_of(weight);
  if (meta != nullptr) view.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<WeightMeta>(meta->instead, weight));
}

}  // namespace tessera
