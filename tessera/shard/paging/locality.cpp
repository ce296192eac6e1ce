#include "tessera/shard/paging/locality.h"

#include <fmt/format.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

std::string name_of(const Origin& origin) {
  const auto unit = origin.unit.lock();
  return unit ? name_of(parameter_of(*unit, origin), *unit) : std::string("a model");  // which is being destroyed
}

void mark(const at::Tensor& result, const OriginPtr& origin) {
  if (!result.defined() || !result.has_storage()) return;
  auto* const impl = result.unsafeGetTensorImpl();
  if (tag_of(result) != nullptr) return;  // its storage tag already says where it comes from
  if (!is_paged(result)) impl->shallow_copy_from(paged_alias(result).getIntrusivePtr());
  if (impl->get_backend_meta() == nullptr) impl->set_backend_meta(origin);
}

[[noreturn]] void refuse_random(const OperatorFacts& op, const Origin& origin) {
  throw UsageError(fmt::format(
      "{} would draw numbers for this rank's part of {} alone, the same ones on all ranks or others than for the whole; draw inside "
      "tessera::full_params(module, Access::Write), or before fully_shard",
      op.name(), name_of(origin)));
}

}  // namespace

OriginPtr origin_of(const at::Tensor& tensor, const StorageTag* tag) {
  if (tag != nullptr) {
    const auto unit = tag->unit.lock();
    return unit ? unit->around(tensor)->origin : nullptr;
  }
  auto meta = tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  auto* const known = dynamic_cast<Origin*>(meta.get());
  return known == nullptr || known->unit.expired() ? nullptr : OriginPtr::reclaim_copy(known);
}

void mark_results(const Stack& stack, size_t base, const OriginPtr& origin) {
  for (size_t i = base; i < stack.size(); i++) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) { mark(tensor, origin); });
  }
}

void refuse_places(const OperatorFacts& op, const Origin& origin) {
  throw UsageError(fmt::format(
      "{} picks values by their places, but the shard of {} has only this rank's part of them, which begins elsewhere on every "
      "rank; write whole parameters inside tessera::full_params(module, Access::Write), or look at tessera::full_parameter(shard). "
      "tessera::to_local(tensor) gives this rank's values, for programs that mean these",
      op.name(), name_of(origin)));
}

void expect_all_values(const OperatorFacts& op, const at::Tensor& viewed, const Stack& stack, size_t base, const Origin& origin) {
  for (size_t i = base; i < stack.size(); i++) {
    for_each_tensor(stack[i], [&](const at::Tensor& view) {
      if (view.numel() < viewed.numel()) refuse_places(op, origin);
    });
  }
}

void expect_same_places(const OperatorFacts& op, const Stack& stack, size_t base, const Origin& origin) {
  const at::Tensor* shard = nullptr;
  for (size_t i = 0; i < op.arguments; i++) {
    for_each_tensor(stack[base + i], [&](const at::Tensor& tensor) {
      const auto* tag = is_paged(tensor) ? tag_of(tensor) : nullptr;
      const bool local = is_paged(tensor) && (tag == nullptr || tag->role != Role::Unsharded);
      if (local && (shard == nullptr || shard->numel() < tensor.numel())) shard = &tensor;
    });
  }
  for (size_t i = 0; i < op.arguments; i++) {
    if (stack[base + i].isTensorList()) continue;  // fused optimizers: the lists belong together tensor by tensor
    for_each_tensor(stack[base + i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.numel() > 1 && tensor.numel() != shard->numel()) refuse_places(op, origin);
      const bool plain = tensor.defined() && !is_paged(tensor);
      if (plain && op.writes[i] && tensor.storage().use_count() > 1) {
        throw UsageError(fmt::format(
            "{} would write values of the shard of {} into a view of an ordinary tensor, which would not know that it has only this "
            "rank's; write tessera::to_local(tensor) there, if you mean these",
            op.name(), name_of(origin)));
      }
    });
  }
}

void expect_no_mixing(const OperatorFacts& op, OperatorKind kind, const Origin& origin) {
  if (op.random) refuse_random(op, origin);
  if (kind != OperatorKind::Other) return;
  throw UsageError(fmt::format(
      "{} over the shard of {}, its gradient, or what was computed from them would be the result of this rank alone. For norms and "
      "clipping there is tessera::clip_grad_norm; a penalty on weights is computed from the modules' own members; "
      "tessera::to_local(tensor) gives this rank's values, for programs that mean these. Optimizers that look at whole parameters, like "
      "LBFGS or Muon, can't work on shards",
      op.name(), name_of(origin)));
}

}  // namespace tessera
