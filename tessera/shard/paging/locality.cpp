#include "tessera/shard/paging/locality.h"

#include <torch/csrc/jit/serialization/pickler.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr auto kToLocal = "If you mean this rank's values alone, take tessera::to_local(tensor)";

std::string name_of(const SourceParameter& source) {
  const auto unit = source.unit.lock();
  return unit ? name_of(parameter_of(*unit, source), *unit) : std::string("a model");  // without a unit, the model is being destroyed
}

void mark(const at::Tensor& result, const SourceParameterPtr& source) {
  if (!result.has_storage()) return;
  auto* const impl = result.unsafeGetTensorImpl();
  if (tag_of(result) != nullptr) return;  // the storage tag already identifies its parameter
  if (!is_paged(result)) impl->shallow_copy_from(paged_alias(result).getIntrusivePtr());
  if (impl->get_backend_meta() == nullptr) impl->set_backend_meta(source);
}

[[noreturn]] void refuse_random(const OperatorFacts& op, const SourceParameter& source) {
  throw UsageError(
      "{} would draw numbers for this rank's part of {} alone: they would repeat on all ranks, or differ from those for the whole "
      "parameter; draw inside tessera::full_params(module, Access::Write), or before fully_shard",
      op.name(), name_of(source));
}

/// The hook that libtorch calls for each tensor that it saves, to ask for additional data to write.
void expect_whole(const at::Tensor& tensor, std::unordered_map<std::string, bool>& /*more*/) {
  if (!is_paged(tensor)) return;
  const auto* const tag = tag_of(tensor);
  if (tag != nullptr && tag->role == Role::Unsharded) return;
  const auto source = source_of(tensor, tag);
  const auto unit = source ? source->unit.lock() : nullptr;
  if (!unit) return;
  const auto& parameter = parameter_of(*unit, *source);
  const bool is_whole = unit->mesh().shard().size() == 1 && tensor.sizes() == at::IntArrayRef(parameter.sizes);
  if (is_whole) return;  // (the shard of a lone rank has all values, but may have another shape)
  throw UsageError(
      "torch::save would write this rank's part of {} alone, and whoever reads the file would take it for the whole; write "
      "instead, on every rank, tessera::checkpoint::save(folder, {{.model = model.get(), .optimizer = &optimizer}}, world), "
      "which load() and load_weights() read, or save tessera::full_state(*model). {}",
      name_of(parameter, *unit), kToLocal);
}

}  // namespace

SourceParameterPtr source_of(const at::Tensor& tensor, const StorageTag* tag) {
  if (tag != nullptr) {
    const auto unit = tag->unit.lock();
    return unit ? unit->around(tensor)->source : nullptr;
  }
  auto meta = tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  auto* const known = dynamic_cast<SourceParameter*>(meta.get());
  return known == nullptr || known->unit.expired() ? nullptr : SourceParameterPtr::reclaim_copy(known);
}

void mark_results(const Stack& stack, size_t base, const SourceParameterPtr& source) {
  for_each_operand(stack, base, [&](size_t, size_t, const at::Tensor& tensor) { mark(tensor, source); });
}

void refuse_places(const OperatorFacts& op, const SourceParameter& source) {
  throw UsageError(
      "{} picks values by their places, but the shard of {} has only this rank's part of them, which begins at another place on every "
      "rank; write whole parameters inside tessera::full_params(module, Access::Write), or read tessera::full_parameter(shard). {}",
      op.name(), name_of(source), kToLocal);
}

void expect_all_values(const OperatorFacts& op, int64_t numel, const Stack& stack, size_t base, const SourceParameter& source) {
  for_each_operand(stack, base, [&](size_t, size_t, const at::Tensor& view) {
    if (view.numel() < numel) refuse_places(op, source);
  });
}

void expect_same_places(const OperatorFacts& op, const Stack& stack, size_t base, const SourceParameter& source) {
  const at::Tensor* shard = nullptr;
  for_each_operand(stack, base, [&](size_t, size_t, const at::Tensor& tensor) {
    const auto* tag = is_paged(tensor) ? tag_of(tensor) : nullptr;
    const bool local = is_paged(tensor) && (tag == nullptr || tag->role != Role::Unsharded);
    if (local && (shard == nullptr || shard->numel() < tensor.numel())) shard = &tensor;
  });
  for_each_operand(stack, base, [&](size_t argument, size_t, const at::Tensor& tensor) {
    if (stack[base + argument].isTensorList()) return;  // fused optimizers: the lists belong together tensor by tensor
    if (tensor.numel() > 1 && tensor.numel() != shard->numel()) refuse_places(op, source);
    if (!is_paged(tensor) && op.writes[argument] && tensor.storage().use_count() > 1) {
      throw UsageError(
          "{} would write values of the shard of {} into a view of an ordinary tensor, which can't be marked as this rank's "
          "part; if you mean this rank's values alone, write tessera::to_local(tensor) there",
          op.name(), name_of(source));
    }
  });
}

void expect_no_mixing(const OperatorFacts& op, OperatorKind kind, const SourceParameter& source) {
  if (op.random) refuse_random(op, source);
  if (kind != OperatorKind::Other) return;
  throw UsageError(
      "{} over the shard of {}, its gradient, or a tensor computed from them would be the result of this rank alone. For norms and "
      "clipping, use tessera::clip_grad_norm; compute a penalty on weights from the modules' own members. "
      "{}. Optimizers that need whole parameters, like LBFGS or Muon, can't work on shards",
      op.name(), name_of(source), kToLocal);
}

void watch_saves() {
  [[maybe_unused]] static const bool once = [] {
    for (auto& asked : torch::jit::GetBackendMetaSerialization()) {
      if (!asked) asked.emplace(&expect_whole, [](const at::Tensor&, std::unordered_map<std::string, bool>&) {});
    }
    return true;
  }();
}

}  // namespace tessera
