#include "tessera/shard/activation/runs.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/paging/locality.h"
#include "tessera/shard/paging/operators.h"
#include "tessera/shard/paging/paged_tensor.h"

namespace tessera::activation {
namespace {

namespace ag = torch::autograd;

/// What stands in the graph for one tensor that was saved.
class HeldHooks final : public ag::SavedVariableHooks {
 public:
  explicit HeldHooks(SegmentRun& run) : run_(&run) {}

  void call_pack_hook(const at::Tensor& tensor) override { held_ = run_->save(tensor); }
  at::Tensor call_unpack_hook() override { return held_.get(); }

 private:
  SegmentRun* run_;  // used at once only
  Held held_;
};

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

at::Tensor view_of(const at::Tensor& bytes, const at::Tensor& like) {
  return at::empty({0}, like.options()).set_(bytes.storage(), like.storage_offset(), like.sizes(), like.strides());
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  return bytes.set_(tensor.storage(), 0, {static_cast<int64_t>(tensor.storage().nbytes())}, {1}).clone();
}

/// Work on tensors that is no part of what the program does.
struct Aside {
  const c10::impl::ExcludeDispatchKeyGuard unpaged{kPagingKey};
  const c10::AutoGradMode no_grad{false};
};

std::vector<at::Tensor> tensors_on(const Stack& stack, size_t base) {
  std::vector<at::Tensor> tensors;
  for (size_t i = base; i < stack.size(); i++) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (tensor.defined()) tensors.push_back(tensor);
    });
  }
  return tensors;
}

/// Stands for what has computed an input of a later run. The graphs of such runs end here.
class Beginning final : public ag::Node {
 public:
  ag::variable_list apply(ag::variable_list&&) override {
    throw UsageError("a checkpointed segment runs a backward pass that goes on outside of it; give autograd::grad the inputs to stop at");
  }
};

[[noreturn]] void refuse_other_course() {
  throw UsageError(
      "a checkpointed segment did something else when it ran again in backward than in forward; it must depend on nothing but its inputs "
      "and "
      "parameters");
}

}  // namespace

at::Tensor stand_in(const at::Tensor& values, bool requires_grad) {
  auto tensor = without_graph(values);
  if (!requires_grad) return tensor;
  const auto node = compat::make_node<Beginning>();  // a leaf could not be changed in place
  node->add_input_metadata(tensor);
  ag::impl::set_gradient_edge(tensor, ag::Edge(node, 0));
  return tensor;
}

// --- any run -------------------------------------------------------------------------------------------------------------------------

bool SegmentRun::keeps(const OperatorFacts& op) const {
  if (!log_->keep || op.views || op.marks) return false;
  return std::ranges::none_of(op.writes, [](bool writes) { return writes; }) && !op.updates_statistics && log_->keep(op.name());
}

bool SegmentRun::opens(const OperatorFacts& op) const {
  // Running statistics and weights of recurrent modules are dealt with where the whole operator is seen.
  return log_->keep && op.composite && !op.updates_statistics && !op.recurrent && !op.views && !keeps(op);
}

std::unique_ptr<ag::SavedVariableHooks> SegmentRun::hooks() {
  return std::make_unique<HeldHooks>(*this);
}

// --- the first run -------------------------------------------------------------------------------------------------------------------

FirstRun::FirstRun(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again, FirstRun* outer)
    : FirstRun(std::make_shared<Segment>(options, inputs, std::move(again)), outer) {
  for (const auto& input : inputs) {
    segment_->hold_input(input, outer != nullptr ? outer->save(input) : Held::stowed(input, options));
    if (const auto* storage = storage_of(input)) inputs_.insert(storage);
  }
}

FirstRun::FirstRun(std::shared_ptr<Segment> segment, FirstRun* outer)
    : SegmentRun(segment->log()), outer_(outer), segment_(std::move(segment)) {
  if (outer != nullptr) outer->log_->inner.push_back(log_);
}

FirstRun::~FirstRun() {
  const Unwatched unwatched;
  segment_->first_run_ends();
}

std::unique_ptr<SegmentRun> FirstRun::inner(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again) {
  return std::make_unique<FirstRun>(options, inputs, std::move(again), this);
}

void FirstRun::note_operand(const at::Tensor& tensor, bool writes, const OperatorFacts& op) {
  if (outer_ != nullptr) outer_->note_operand(tensor, writes, op);
  const auto* const storage = storage_of(tensor);
  if (storage == nullptr || op.marks) return;
  if (writes) note_write(tensor, op);
  if (own_.contains(storage) || inputs_.contains(storage)) return;
  foreign_.insert(storage);
  if (reads_.emplace(storage, tensor.storage_offset()).second) segment_->note_read(tensor);
}

void FirstRun::note_write(const at::Tensor& tensor, const OperatorFacts& op) {
  auto* const storage = storage_of(tensor);
  for (auto& kept : log_->kept) {
    for (auto& result : kept.results) {
      if (!result.value.is_of(storage)) continue;
      result.value.separate();
      result.changes = true;
    }
  }
  if (inputs_.contains(storage)) {
    throw UsageError(fmt::format(
        "{} changes an input of a checkpointed segment in place, which has to run again with the input as it was; use the operator "
        "that returns a new tensor (for modules, leave their option inplace out)",
        op.name()));
  }
  if (own_.contains(storage) || is_paged(tensor)) return;
  const auto same = [&](const Log::Write& write) { return write.storage._unsafe_get_target() == storage; };
  if (std::ranges::any_of(log_->writes, same)) return;
  const Aside aside;
  log_->writes.push_back(
      {.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), .before = bytes_of(tensor)});
}

void FirstRun::note_results(const Stack& stack, size_t base, const std::vector<at::Tensor>& operands) {
  for (size_t i = base; i < stack.size(); i++) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      const auto* const storage = tensor.defined() ? storage_of(tensor) : nullptr;
      if (storage == nullptr || std::ranges::find(operands, storage, storage_of) != operands.end()) return;
      for (auto* run = this; run != nullptr; run = run->outer_) {
        run->own_.insert(storage);
        run->foreign_.erase(storage);  // of one that is gone and had this address
      }
    });
  }
}

void FirstRun::run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  const auto base = stack.size() - op.arguments;
  const bool updates = op.updates_statistics && stack[base + OperatorFacts::kTraining].toBool();
  std::vector<at::Tensor> operands;
  for (size_t i = 0; i < op.arguments; i++) {
    for_each_tensor(stack[base + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      operands.push_back(tensor);
      note_operand(tensor, op.writes[i] || (updates && (i == OperatorFacts::kRunningMean || i == OperatorFacts::kRunningMean + 1)), op);
    });
  }
  if (!keeps(op)) {
    handle.redispatchBoxed(below, &stack);
    return note_results(stack, base, operands);
  }
  auto& kept = log_->kept.emplace_back();
  kept.name = op.name();
  keeping_ = &kept;
  operands_ = &operands;
  try {
    handle.redispatchBoxed(below, &stack);
  } catch (...) {
    keeping_ = nullptr;
    throw;
  }
  keeping_ = nullptr;
  note_results(stack, base, operands);
  for (size_t i = base; i < stack.size() && !kept.runs_again; i++) {
    kept.runs_again = !stack[i].isTensor() || !stack[i].toTensor().defined() || !own_.contains(storage_of(stack[i].toTensor()));
  }
  for (size_t i = base; i < stack.size() && !kept.runs_again; i++) {
    const auto& result = stack[i].toTensor();
    kept.results.push_back({.value = Held::stowed(result, segment_->options()), .requires_grad = result.requires_grad()});
  }
  if (op.random && !kept.runs_again) kept.random_after.emplace(devices_of(operands));
}

Held FirstRun::save(const at::Tensor& tensor) {
  const auto* const storage = storage_of(tensor);
  const bool is_foreign = is_paged(tensor) || (storage != nullptr && foreign_.contains(storage));
  if (keeping_ != nullptr) {
    if (is_foreign) return Held::in_memory(tensor);
    for (size_t i = 0; i < operands_->size(); i++) {
      const auto& operand = (*operands_)[i];
      if (storage == nullptr || storage_of(operand) != storage || operand.scalar_type() != tensor.scalar_type()) continue;
      const auto slot = segment_->add_slot(tensor);
      keeping_->slots.push_back({.slot = slot,
                                 .operand = i,
                                 .sizes = tensor.sizes().vec(),
                                 .strides = tensor.strides().vec(),
                                 .offset = tensor.storage_offset() - operand.storage_offset()});
      return {segment_, slot};
    }
    return Held::stowed(tensor, segment_->options());
  }
  if (is_foreign) {
    log_->saved.emplace_back();
    return Held::in_memory(tensor);
  }
  const auto slot = segment_->add_slot(tensor);
  log_->saved.emplace_back(slot);
  return {segment_, slot};
}

// --- later runs ----------------------------------------------------------------------------------------------------------------------

LaterRun::LaterRun(std::shared_ptr<Log> log, Segment* filled) : SegmentRun(std::move(log)), filled_(filled) {
  make_copies();
}

LaterRun::LaterRun(std::shared_ptr<Log> log, LaterRun* outer) : SegmentRun(std::move(log)), filled_(nullptr), outer_(outer) {
  make_copies();
}

LaterRun::~LaterRun() = default;

void LaterRun::make_copies() {
  const Aside aside;
  for (const auto& write : log_->writes) {
    if (auto storage = write.storage.lock()) copies_.push_back({.storage = std::move(storage), .bytes = write.before.clone()});
  }
}

std::unique_ptr<SegmentRun> LaterRun::inner(const Options&, const std::vector<at::Tensor>& inputs, detail::Again) {
  for (const auto& input : inputs) save(input);
  if (inner_ == log_->inner.size()) refuse_other_course();
  return std::unique_ptr<SegmentRun>(new LaterRun(log_->inner[inner_++], this));
}

void LaterRun::result(at::Tensor& tensor) const {
  // Without its graph, which would keep the activations of the inner segment.
  tensor = stand_in(tensor, tensor.requires_grad());
}

const LaterRun::Copy* LaterRun::copy_of(const at::Tensor& tensor) const {
  // That of the outermost run, whose operators read it later.
  const auto* const outer = outer_ != nullptr ? outer_->copy_of(tensor) : nullptr;
  if (outer != nullptr) return outer;
  const auto found = std::ranges::find(copies_, storage_of(tensor), [](const Copy& copy) { return copy.storage.get(); });
  return found == copies_.end() ? nullptr : &*found;
}

at::Tensor LaterRun::replaced(const at::Tensor& tensor) const {
  const auto* const copy = tensor.defined() && tensor.has_storage() ? copy_of(tensor) : nullptr;
  if (copy == nullptr) return tensor;
  const Aside aside;
  return stand_in(view_of(copy->bytes, tensor), tensor.requires_grad());
}

void LaterRun::run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  if (op.marks) return handle.redispatchBoxed(below, &stack);
  for (size_t i = stack.size() - op.arguments; i < stack.size() && has_copies(); i++) {
    if (stack[i].isTensor()) {
      stack[i] = replaced(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      auto tensors = stack[i].toTensorVector();
      for (auto& tensor : tensors) tensor = replaced(tensor);
      stack[i] = std::move(tensors);
    }
  }
  if (keeps(op)) return repeat_kept(handle, op, below, stack);
  handle.redispatchBoxed(below, &stack);
}

void LaterRun::repeat_kept(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  if (kept_ == log_->kept.size() || log_->kept[kept_].name != op.name()) refuse_other_course();
  const auto& kept = log_->kept[kept_++];
  const auto base = stack.size() - op.arguments;
  const auto operands = tensors_on(stack, base);
  if (kept.runs_again) {
    ignores_ = true;
    handle.redispatchBoxed(below, &stack);
    ignores_ = false;
  } else {
    torch::jit::drop(stack, op.arguments);
    for (const auto& [value, requires_grad, changes] : kept.results) {
      const Aside aside;
      stack.emplace_back(stand_in(changes ? value.get().clone() : value.get(), requires_grad));
    }
    if (kept.random_after) kept.random_after->set();
  }
  if (filled_ == nullptr) return;
  for (const auto& [slot, operand, sizes, strides, offset] : kept.slots) {
    if (operand >= operands.size()) refuse_other_course();
    const Aside aside;
    filled_->fill(slot, operands[operand].as_strided(sizes, strides, operands[operand].storage_offset() + offset));
  }
}

Held LaterRun::save(const at::Tensor& tensor) {
  if (!ignores_) {
    if (saved_ == log_->saved.size()) refuse_other_course();
    const auto slot = log_->saved[saved_++];
    if (slot && filled_ != nullptr) filled_->fill(*slot, tensor);
  }
  // For backward passes inside of the segment. The graph of this run goes with it.
  return Held::in_memory(tensor);
}

}  // namespace tessera::activation
