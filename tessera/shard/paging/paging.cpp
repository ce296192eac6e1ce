#include "tessera/shard/paging/paging.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/loaded_libtorch.h"
#include "tessera/base/log.h"
#include "tessera/base/no_copy.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/backward/unit_node.h"
#include "tessera/shard/deferred/deferred_storage.h"
#include "tessera/shard/deferred/recording.h"
#include "tessera/shard/dispatch/operators.h"
#include "tessera/shard/dispatch/watcher.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/paging/libtorch_checks.h"
#include "tessera/shard/paging/locality.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

struct PagedOperand {
  size_t argument, element;
  const at::Tensor* tensor;  // points into the stack
  StorageTag* tag;           // null for a local value, and for a weight whose operators are replaced
};
using PagedOperands = c10::SmallVector<PagedOperand, 8>;  // nearly no operator has more, so nearly none needs an allocation

/// Finds the paged operands of an operator. This is the only loop over all operands, nearly none of which is paged.
PagedOperands paged_operands(const OperatorFacts& op, const Stack& stack) {
  PagedOperands result;
  for_each_operand(stack, stack.size() - op.arguments, [&](size_t argument, size_t element, const at::Tensor& tensor) {
    if (is_paged(tensor)) result.push_back({argument, element, &tensor, tag_of(tensor)});
  });
  return result;
}

/// The units of one operator's paged operands, by how it uses them.
struct Operands {
  c10::SmallVector<Unit*, 4> units;                    // units whose unsharded parameters it uses
  c10::SmallVector<const at::Tensor*, 2> written;      // shards that it writes
  c10::SmallVector<std::shared_ptr<Unit>, 2> changed;  // the units of `written`
  c10::SmallVector<Unit*, 2> reduced;                  // units whose gradients it uses while their reduction is in flight
  c10::SmallVector<std::shared_ptr<Unit>, 2> alive;    // units of shards and gradients, which do not own their units
  SourceParameterPtr source;                           // the parameter from whose shard the first local value was computed
};

/// Throws UsageError if an unsharded parameter was given memory that does not belong to its unit.
void refuse_stranger(const at::Tensor& tensor, const OperatorFacts& op) {
  if (unsharded_meta(tensor) == nullptr) return;
  throw UsageError(
      "{}: a sharded parameter was given other memory (by set_data, to() or torch::load?), so it belongs to no unit any "
      "more; change parameters through their shards, or inside tessera::full_params",
      op.name());
}

bool may_write_unsharded(Unit& unit) {
  return LockedState(unit)->allows_unsharded_writes();
}

/// Throws UsageError if forward uses a unit outside of the module calls that its options need.
void expect_calls(Unit& unit, const at::Tensor& used, const OperatorFacts& op) {
  if (unit.needed_calls().empty() || torch::autograd::get_current_graph_task_id() != -1 || unit.flags().is_pinned()) return;
  for (const auto& call : unit.needed_calls()) {
    if (call.with_graph_only && !c10::GradMode::is_enabled()) continue;
    if (!call.parameters.empty() && std::ranges::find(call.parameters, unit.around(used)) == call.parameters.end()) continue;
    const auto is_called = [](const auto* module) { return in_forward_of(*module); };
    if (std::ranges::any_of(call.modules, is_called)) continue;
    if (std::ranges::any_of(call.inner, is_called)) {
      if (call.is_said->exchange(true)) continue;
      log(LogLevel::Warning,
          fmt::format("{} was called plainly: its {} does nothing. Call it as tessera::call(module, x...).", call.name, call.option));
      continue;
    }
    throw UsageError(
        "{} uses unit '{}', but the {} of {} acts where that module is called, and Tessera does not see a plain call; call "
        "it as tessera::call(module, x...), make it a tessera::FullyShardedDataParallel,{} or leave the option out",
        op.name(), unit.name(), call.option, call.name, call.other_way);
  }
}

/// Throws UsageError if a view of an unsharded parameter was made while the parameter had another dtype, and so other memory, than now.
void expect_current(const at::Tensor& tensor, const StorageTag& tag, const OperatorFacts& op) {
  const auto& unit = *tag.owner;
  const auto& group = unit.groups()[tag.group];
  if (group.dtype == group.unsharded_dtype || tensor.scalar_type() != (unit.flags().shows_stored ? group.unsharded_dtype : group.dtype))
    return;
  throw UsageError(
      "{} uses a view of {} from {} tessera::full_params(module, Access::Write) or ReadStored, where parameters have the dtype of their "
      "shards, {} and not {}; take it from the module again",
      op.name(), name_of(*unit.around(tensor), unit), unit.flags().shows_stored ? "before" : "inside", c10::toString(group.dtype),
      c10::toString(group.unsharded_dtype));
}

void note(Operands& operands, const PagedOperand& operand, const OperatorFacts& op) {
  const auto& tensor = *operand.tensor;
  const auto* const tag = operand.tag;
  const bool writes = op.writes[operand.argument];
  if (tag == nullptr) {
    refuse_stranger(tensor, op);
    if (!operands.source) operands.source = source_of(tensor, nullptr);
    return;
  }
  if (tag->role == Role::Unsharded) {
    auto* unit = tag->owner.get();
    expect_current(tensor, *tag, op);
    if (writes && !may_write_unsharded(*unit)) {
      throw UsageError(
          "{} would write {}, which is unsharded only temporarily, so the change would be lost; write "
          "inside tessera::full_params(module, Access::Write), or write the shards. Make optimizers after fully_shard; a torch::optim "
          "optimizer that was made before can be moved by tessera::rebind(optimizer, model)",
          op.name(), name_of(*unit->around(tensor), *unit));
    }
    expect_calls(*unit, tensor, op);
    if (c10::GradMode::is_enabled()) follow_training(*unit, tensor);
    if (std::ranges::find(operands.units, unit) == operands.units.end()) operands.units.push_back(unit);
    return;
  }
  // to() of a recurrent module reads its weights from parameters() again, so the module then holds shards in place of the unsharded
  // parameters.
  if (op.recurrent) {
    throw UsageError(
        "{} was given shards in place of unsharded weights, because to() of a recurrent module was called after fully_shard; "
        "call to() before",
        op.name());
  }
  const auto unit = tag->unit.lock();
  if (!unit) return;  // the model is gone, and its shards are ordinary tensors
  if (!operands.source) operands.source = source_of(tensor, tag);
  if (tag->role == Role::Sharded && unit->flags().unset > 0) {
    if (writes) {
      note_values(*unit, tensor);
    } else if (!op.name().ends_with("_like")) {  // zeros_like and the like need only the shape
      expect_values_of(*unit, tensor, op.name());
    }
  }
  if (writes && tag->role == Role::Sharded) {
    operands.written.push_back(&tensor);
    if (std::ranges::find(operands.changed, unit) == operands.changed.end()) operands.changed.push_back(unit);
  }
  if (tag->role == Role::Gradient && unit->flags().is_reducing) operands.reduced.push_back(unit.get());
  operands.alive.push_back(unit);
}

/// Handles the operator by which torch::load gives each parameter the memory that it has read. Where one rank has all of a parameter, the
/// shard keeps its own memory and copies the values. Returns false if the tensor is not a shard.
bool loads_shard(Stack& stack) {
  const auto source = stack[stack.size() - 1].toTensor();
  auto self = stack[stack.size() - 2].toTensor();
  const auto found = locate(self);
  if (found.parameter == nullptr || !found.parameter->shard.is_same(self)) return false;
  if (found.unit->mesh().shard().size() > 1 || source.sizes() != self.sizes()) {
    throw UsageError(
        "torch::load would put values of the shape [{}] in place of the shard of '{}', which has [{}] of [{}] on this rank; load "
        "whole weights before fully_shard, or with tessera::checkpoint::load_weights(*model, file)",
        joined(source.sizes()), found.parameter->name, joined(self.sizes()), joined(found.parameter->sizes));
  }
  self.copy_(source);
  stack.pop_back();
  return true;
}

/// Throws UsageError if Module::clone() copies a shard. Assumes that a copy comes from Module::clone() if gradients are disabled.
void refuse_cloning(const OperatorFacts& op, const Stack& stack) {
  if (c10::GradMode::is_enabled()) return;
  const auto& self = stack[stack.size() - op.arguments].toTensor();
  if (const auto found = locate(self); found.parameter != nullptr && found.parameter->shard.is_same(self)) {
    throw UsageError(
        "a clone of a sharded module would hold only this rank's part of '{}'; clone it before fully_shard, and for a copy "
        "of a shard's values write shard.detach().clone()",
        found.parameter->name);
  }
}

/// Throws UsageError for operators that would give a parameter or shard other memory.
[[noreturn]] void refuse_rebinding(const OperatorFacts& op) {
  throw UsageError("{} on a sharded parameter would cut it off from its unit; load and convert before fully_shard", op.name());
}

/// Called for the first operator of set_data: throws UsageError if a parameter or shard would get other memory.
void refuse_other_memory(const OperatorFacts& op, const Stack& stack) {
  const auto& self = stack[stack.size() - op.arguments].toTensor();
  const auto& other = stack[stack.size() - op.arguments + 1].toTensor();
  if (!is_paged(self) || (other.has_storage() && storage_of(other) == storage_of(self))) return;
  if (is_only_replaced(self)) return keep_replaced(other);
  throw UsageError(
      "set_data on a sharded parameter or shard (to(dtype), to(device), clone() and vector_to_parameters use it) would cut it off "
      "from its unit; convert the model before fully_shard");
}

/// The dtype of the first unsharded parameter that the operator uses.
std::optional<at::ScalarType> dtype_of_parameters(const PagedOperands& paged) {
  for (const auto& [argument, element, tensor, tag] : paged) {
    const bool is_parameter = tag != nullptr && tag->role == Role::Unsharded && at::isFloatingType(tensor->scalar_type());
    if (is_parameter) return tensor->scalar_type();
  }
  return std::nullopt;
}

/// Casts the operator's floating-point operands to the dtype in which the unit computes. While the unit shows its stored form, casts
/// operands of that dtype to the dtype of the shards instead. For operators that update running statistics, casts parameters to float32
/// instead.
void cast_operands(const OperatorFacts& op, Stack& stack, const PagedOperands& paged, Unit& unit) {
  // Backward operators need their operands exactly as the forward operators saw them.
  if (!unit.compute_dtype() || op.backward) return;
  const bool stored = unit.flags().shows_stored;
  if (stored && op.updates_statistics) return;  // such an operator may have a weight that is wider than its input
  const auto dtype = stored ? dtype_of_parameters(paged) : unit.compute_dtype();
  if (!dtype) return;
  const size_t base = stack.size() - op.arguments;
  const auto cast = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return tensor;
    if (op.updates_statistics) return is_paged(tensor) ? tensor.to(at::kFloat) : tensor;
    if (is_paged(tensor) || tensor.scalar_type() == *dtype) return tensor;
    if (stored && tensor.scalar_type() != *unit.compute_dtype()) return tensor;  // the program has chosen this dtype
    const LockedState state(unit);
    const CastingOperand casting;
    auto result = state->casts.cast(tensor, *dtype);
    if (const Watcher::Turn watcher; watcher) watcher->replaced(tensor, result);
    return result;
  };
  for (size_t i = 0; i < op.arguments; i++) {
    if (!op.writes[i]) change_operands(stack[base + i], cast);
  }
}

/// Gives an operator that updates running statistics float32 copies of them, if buffer_dtype has made them narrower: libtorch does not
/// accept narrow statistics in all combinations with other dtypes.
class WideStatistics {
 public:
  WideStatistics(const OperatorFacts& op, Stack& stack) {
    const auto base = stack.size() - op.arguments;
    const bool updates = stack[base + OperatorFacts::kTraining].toBool();
    for (const auto place : {OperatorFacts::kRunningMean, OperatorFacts::kRunningMean + 1}) {
      auto& value = stack[base + place];
      if (!value.isTensor() || !value.toTensor().defined() || !at::isReducedFloatingType(value.toTensor().scalar_type())) continue;
      const auto narrow = value.toTensor();
      const auto wide = narrow.to(at::promoteTypes(at::kFloat, stack[base].toTensor().scalar_type()));
      if (updates) copies_.emplace_back(narrow, wide);
      value = wide;
    }
  }
  void write_back() const {
    const c10::AutoGradMode no_grad(false);
    for (const auto& [narrow, wide] : copies_) narrow.copy_(wide);
  }

 private:
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> copies_;
};

/// Runs the function that replaces the operator for this weight, if there is one. Operators that the function calls are paged one by one.
bool ran_replacement(const OperatorFacts& op, Stack& stack) {
  const auto operands = std::span(stack).last(op.arguments);
  const auto& weight = operands[*op.weight];
  if (!weight.isTensor() || !weight.toTensor().defined()) return false;
  auto result = replaced_operator(weight.toTensor(), op.name(), operands);
  if (!result) return false;
  torch::jit::drop(stack, op.arguments);
  torch::jit::push(stack, *std::move(result));
  return true;
}

/// Replaces operands that are weights held in another form by their values. Returns false if there is no such operand.
bool decode_operands(const OperatorFacts& op, Stack& stack, const PagedOperands& paged) {
  c10::SmallVector<std::pair<const PagedOperand*, at::Tensor>, 1> found;
  for (const auto& operand : paged) {
    auto values = operand.tag == nullptr ? decoded(*operand.tensor) : at::Tensor();
    if (!values.defined()) continue;
    if (op.writes[operand.argument]) {
      throw UsageError("{} would write a weight that is held in another form and frozen; write it before it is quantised, or load weights",
                       op.name());
    }
    found.emplace_back(&operand, std::move(values));
  }
  const size_t base = stack.size() - op.arguments;
  for (auto& [operand, values] : found) put_operand(stack[base + operand->argument], operand->element, std::move(values));
  return !found.empty();
}

void expect_one_dtype(const OperatorFacts& op, std::span<Unit* const> units) {
  for (const auto* unit : units) {
    if (unit->compute_dtype() == units.front()->compute_dtype()) continue;
    throw UsageError(
        "{} uses parameters of units '{}' and '{}', which compute in different dtypes; shard them with the same param_dtype or codec",
        op.name(), units.front()->name(), unit->name());
  }
}

/// Unshards units and keeps them pinned while an operator runs. In nearly all cases, the units belong to one model.
class Pins : NoCopy {
 public:
  /// If the constructor throws, it releases the units that it has pinned.
  Pins(std::span<Unit* const> units, std::span<at::Tensor> operands) : Pins() {
    for (auto* unit : units) {
      auto* schedule = unit->schedule().get();
      auto known = std::ranges::find(used_, schedule, &Use::schedule);
      if (known == used_.end()) {
        used_.push_back({.schedule = schedule, .units = {}});
        known = used_.end() - 1;
      }
      known->units.push_back(unit);
    }
    for (; pinned_ < used_.size(); pinned_++) used_[pinned_].schedule->use(used_[pinned_].units, operands);
  }
  ~Pins() {
    for (size_t i = 0; i < pinned_; i++) used_[i].schedule->release(used_[i].units);
  }

 private:
  struct Use {
    Schedule* schedule;  // owned by its units
    c10::SmallVector<Unit*, 4> units;
  };

  Pins() = default;

  c10::SmallVector<Use, 2> used_;
  size_t pinned_ = 0;
};

/// Throws UsageError if an operator reads unsharded parameters of the model whose shards it writes. Unsharding publishes all writes to the
/// model, and this operator would write only after that.
void expect_no_unshard_in_write(const OperatorFacts& op, const Operands& operands) {
  for (const auto& changed : operands.changed) {
    const auto reads = std::ranges::find(operands.units, changed->schedule(), [](const Unit* unit) { return unit->schedule(); });
    if (reads == operands.units.end()) continue;
    throw UsageError(
        "{} writes shards of unit '{}' with values of the same model's unsharded parameters, of unit '{}'; clone() these before", op.name(),
        changed->name(), (*reads)->name());
  }
}

/// The operator's other tensors, for a transport that traces. The transport ties the all-gather to them, and may replace them by tensors
/// with equal values.
class TracedOperands {
 public:
  static bool are_needed(std::span<Unit* const> units) {
    return std::ranges::any_of(units, [](const Unit* unit) { return !unit->device().is_cpu() && unit->mesh().shard().traits().traces; });
  }

  TracedOperands(const OperatorFacts& op, Stack& stack, std::span<Unit* const> units) : stack_(stack) {
    const Watcher::Turn watcher;
    for (size_t i = 0; i < op.arguments; i++) {
      const auto place = stack.size() - op.arguments + i;
      const bool is_statistics = op.updates_statistics && (i == OperatorFacts::kRunningMean || i == OperatorFacts::kRunningMean + 1);
      if (op.writes[i] || is_statistics || !stack[place].isTensor()) continue;
      const auto& tensor = stack[place].toTensor();
      if (!tensor.defined() || is_paged(tensor) || tensor.device() != units.front()->mesh().shard().traits().device) continue;
      places_.push_back(place);
      tensors_.push_back(watcher ? watcher->instead_of(tensor) : tensor);
    }
    untied_ = tensors_;
  }

  std::span<at::Tensor> tensors() { return tensors_; }

  /// Puts tensors that the transport has replaced onto the stack.
  void put_back() {
    for (size_t i = 0; i < tensors_.size(); i++) {
      const auto& before = untied_[i];
      if (tensors_[i].is_same(before)) continue;
      // The new tensor also takes the place of the original in the autograd graph.
      if (c10::GradMode::is_enabled() && before.requires_grad()) {
        torch::autograd::impl::set_gradient_edge(tensors_[i], torch::autograd::impl::gradient_edge(before));
      }
      if (const Watcher::Turn watcher; watcher) watcher->replaced(stack_[places_[i]].toTensor(), tensors_[i]);
      stack_[places_[i]] = tensors_[i];
    }
  }

 private:
  Stack& stack_;
  std::vector<size_t> places_;
  std::vector<at::Tensor> tensors_, untied_;
};

/// Runs an operator that returns views. It unshards nothing, because views read no values.
void page_view(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack* stack) {
  const auto base = stack->size() - op.arguments;
  const auto& viewed = (*stack)[base].toTensor();
  const auto weight = op.transposes ? viewed : at::Tensor();
  SourceParameterPtr source;
  int64_t numel = 0;
  if (is_paged(viewed)) {
    const auto* const tag = tag_of(viewed);
    if (tag == nullptr) refuse_stranger(viewed, op);
    if (tag == nullptr || tag->role != Role::Unsharded) {
      source = source_of(viewed, tag);
      numel = viewed.numel();
    } else if (c10::GradMode::is_enabled()) {
      follow_training(*tag->owner, viewed);
    }
  }
  try {
    std::optional<c10::impl::ExcludeDispatchKeyGuard> below_too;
    // The operator makes a view inside, which must not be decoded.
    if (op.transposes && held_form(viewed) != nullptr) below_too.emplace(kPagingKey);
    handle.redispatchBoxed(below, stack);
  } catch (const c10::Error&) {
    // A view fails at positions that exist in the full parameter, but not in the shard. Other errors may name a device that does not exist.
    const bool names_device = handle.schema().argumentIndexWithName("device").has_value();
    if (source && !names_device) refuse_places(op, *source);
    throw;
  }
  if (op.transposes) note_transposed(weight, stack->back().toTensor());
  if (!source) return;
  expect_all_values(op, numel, *stack, base, *source);
  mark_results(*stack, base, source);
}

/// Runs the operator itself. Operators that it or its kernel calls are not paged again.
void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack* stack) {
  const Watcher::Turn watcher;
  const c10::impl::ExcludeDispatchKeyGuard excluded(kPagingKey);
  if (watcher) {
    watcher->run(handle, op, below, *stack);
  } else {
    handle.redispatchBoxed(below, stack);
  }
}

bool opens(const OperatorFacts& op, c10::DispatchKeySet below) {
  const Watcher::Turn watcher;
  return watcher && watcher->opens(op, below);
}

void page(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto& op = facts_of(handle);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagingKey);
  if (may_be_deferred() && record(handle, op, below, stack)) return;
  if (op.weight && ran_replacement(op, *stack)) return;
  // While a thread has a Watcher, its keys include the paging key, so that all its operators come here, also those without paged operands.
  // A task that such a thread starts inherits the keys, so its operators come here, too, but no Watcher sees them.
  const bool sees_all = c10::impl::tls_is_dispatch_key_included(kPagingKey);
  if (sees_all && opens(op, below)) return handle.redispatchBoxed(below, stack);
  const auto paged = paged_operands(op, *stack);
  if (sees_all && paged.empty()) return run(handle, op, below, stack);
  if (op.sets_storage && loads_shard(*stack)) return;
  if (op.rebinds) {
    if (is_only_replaced((*stack)[stack->size() - op.arguments].toTensor())) return handle.redispatchBoxed(below, stack);
    refuse_rebinding(op);
  }
  if (op.compares_kinds) {
    refuse_other_memory(op, *stack);
    handle.redispatchBoxed(below, stack);
    return;
  }
  if (op.clones) refuse_cloning(op, *stack);
  if (!op.transposes && decode_operands(op, *stack, paged)) return handle.callBoxed(stack);
  if (op.views) return page_view(handle, op, below, stack);
  Operands operands;
  const size_t base = stack->size() - op.arguments;
  for (const auto& operand : paged) note(operands, operand, op);
  if (operands.source) {
    const auto kind = op.kind(below);
    expect_no_mixing(op, kind, *operands.source);
    if (kind == OperatorKind::Composite) return handle.redispatchBoxed(below, stack);  // the operators that it calls come here one by one
    expect_same_places(op, *stack, base, *operands.source);
  }
  for (auto* unit : operands.reduced) unit->schedule()->finish_reductions();
  if (!operands.units.empty()) expect_no_unshard_in_write(op, operands);
  std::optional<WriteGuard> guard;
  if (!operands.written.empty()) {
    guard.emplace(operands.changed, WriteKind::Operators);
    for (const auto* shard : operands.written) guard->outdate(*shard);
    if (!operands.units.empty()) guard.reset();  // unsharding waits for other ranks, and no lock may be held meanwhile
  }
  std::optional<TracedOperands> traced;
  if (TracedOperands::are_needed(operands.units)) traced.emplace(op, *stack, operands.units);
  const Pins pins(operands.units, traced ? traced->tensors() : std::span<at::Tensor>());
  if (traced) traced->put_back();
  if (!operands.units.empty()) {
    expect_one_dtype(op, operands.units);
    cast_operands(op, *stack, paged, *operands.units.front());
  }
  std::optional<WideStatistics> statistics;
  if (op.updates_statistics) statistics.emplace(op, *stack);
  c10::SmallVector<TaggedStorage*, 2> written;
  for (const auto* shard : operands.written) written.push_back(tagged_storage(*shard));
  run(handle, op, below, stack);
  if (statistics) statistics->write_back();
  for (auto* storage : written) storage->watch_raw_writes();
  if (operands.source && !op.inspects) mark_results(*stack, base, operands.source);
}

}  // namespace

void install_paging() {
  watch_saves();
  // Never destroyed, because parameters in static storage are used after main.
  [[gnu::used]] static torch::Library* const library = [] {
    TaggedStorage::on_raw_write = &hand_out_pointer;
    try {
      auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kPagingKey, __FILE__, __LINE__);
      made->fallback(torch::CppFunction::makeFromBoxedFunction<&page>());
      return made.release();
    } catch (const std::exception& error) {
      throw UsageError(
          "another library has taken libtorch's DeferredInit key, which Tessera needs for sharded parameters "
          "(torchdistx does so): {}",
          first_line(error));
    }
  }();
  [[maybe_unused]] static const bool is_sound = [] {
    expect_fitting_libtorch();
    if (Simulation::current() == nullptr) expect_sound_libtorch();  // simulated tensors have no values
    return true;
  }();
}

}  // namespace tessera
