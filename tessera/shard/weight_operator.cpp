#include "tessera/shard/weight_operator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <utility>

#include "tessera/base/compat.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/paging/paging.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/tables.h"

namespace tessera {

void replace_weight_operator(const at::Tensor& weight, WeightOperator instead) {
  install_paging();
  auto& meta = WeightMeta::of(weight);
  meta.instead = instead ? std::make_shared<const WeightOperator>(std::move(instead)) : nullptr;
  // Paging has to see operators also on a weight that is not sharded.
  if (!is_paged(weight)) weight.unsafeGetTensorImpl()->shallow_copy_from(paged_alias(weight).getIntrusivePtr());
}

at::Tensor hold_in_form(torch::nn::Module& model, const at::Tensor& weight, HeldForm form) {
  install_paging();
  const c10::AutoGradMode no_grad(false);
  const auto shared = std::make_shared<const HeldForm>(std::move(form));
  const auto held = shared->encode(weight.detach());
  WeightMeta::of(held).form = shared;
  const auto list_held = [&](torch::nn::Module& module) {
    for (auto& item : table_of(module)) {
      if (item.value().is_same(weight)) item.value() = held;
    }
  };
  list_held(model);
  for (const auto& module : model.modules(/*include_self=*/false)) list_held(*module);
  auto& meta = WeightMeta::of(weight);
  meta.form = shared;
  meta.held = held;
  meta.set_requires_grad(false, weight.unsafeGetTensorImpl());
  abandon_values(weight);
  const auto bytes = static_cast<size_t>(weight.numel()) * weight.element_size();
  c10::Storage nothing(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, held.is_meta() ? c10::Device(at::kCPU) : held.device()));
  compat::guard_storage(*nothing.unsafeGetStorageImpl(), "a weight that is held in another form has no memory of its own");
  const auto view = paged_view(nothing, weight.scalar_type(), weight.sizes(), weight.strides(), 0);
  weight.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  return held;
}

PlainOperators::PlainOperators() : before_(std::exchange(runs_plainly(), true)) {}

PlainOperators::~PlainOperators() {
  runs_plainly() = before_;
}

}  // namespace tessera
