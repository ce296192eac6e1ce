#include "tessera/shard/activation/runs.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/dispatch/operators.h"
#include "tessera/shard/paging/locality.h"
#include "tessera/shard/storage/paged_tensor.h"

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
      "and parameters");
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

SegmentRun::SegmentRun(std::shared_ptr<Log> log) : log_(std::move(log)), graph_task_(ag::get_current_graph_task_id()), watching_(this) {}

bool SegmentRun::is_of_program(const OperatorFacts& op) const {
  return !op.marks && !is_casting() && ag::get_current_graph_task_id() == graph_task_;
}

bool SegmentRun::keeps(const OperatorFacts& op) const {
  if (!log_->keep || op.views || !is_of_program(op)) return false;
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

FirstRun::FirstRun(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again, const torch::nn::Module* module,
                   FirstRun* outer)
    : FirstRun(std::make_shared<Segment>(options, inputs, std::move(again), module), outer) {
  for (const auto& input : inputs) {
    segment_->hold_input(input, outer != nullptr ? outer->save(input) : Held::stowed(input, options));
    const auto* const storage = storage_of(input);
    if (storage == nullptr) continue;
    inputs_.emplace(storage, c10::weak_intrusive_ptr<c10::StorageImpl>(input.storage().getWeakStorageImpl()));
    from_inputs_.insert(storage);
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

std::unique_ptr<SegmentRun> FirstRun::inner(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again,
                                            const torch::nn::Module* module) {
  return std::make_unique<FirstRun>(options, inputs, std::move(again), module, this);
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
  if (is_paged(tensor)) return;
  if (own_.contains(storage)) {
    log_->own_writes.try_emplace(storage, tensor.storage().getWeakStorageImpl());
    return;
  }
  const auto same = [&](const Log::Write& write) { return write.storage._unsafe_get_target() == storage; };
  if (std::ranges::any_of(log_->writes, same)) return;
  const Aside aside;
  log_->writes.push_back(
      {.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), .before = bytes_of(tensor)});
}

void FirstRun::note_course(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands,
                           const std::vector<bool>& written) {
  std::vector<bool> is_foreign(operands.size());
  bool depends = false, writes_foreign = false;
  for (size_t i = 0; i < operands.size(); i++) {
    const auto* const storage = storage_of(operands[i]);
    depends = depends || from_inputs_.contains(storage);
    writes_foreign = writes_foreign || (written[i] && !own_.contains(storage));
    const bool reads = i > 0 || !op.replaces;  // what is filled may have no values yet
    is_foreign[i] = reads && foreign_.contains(storage) && !is_paged(operands[i]);
  }
  const auto left_out = op.random || writes_foreign ? LeftOut::Never : depends ? LeftOut::IfAsked : LeftOut::Freely;
  log_->course.note(op, stack, stack.size() - op.arguments, left_out, is_foreign);
}

void FirstRun::note_results(const Stack& stack, size_t base, const std::vector<at::Tensor>& operands) {
  for (size_t i = base; i < stack.size(); i++) {
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      const auto* const storage = tensor.defined() ? storage_of(tensor) : nullptr;
      if (storage == nullptr) return;
      const bool is_new = std::ranges::find(operands, storage, storage_of) == operands.end();
      for (auto* run = this; run != nullptr; run = run->outer_) {
        // An earlier storage may have had this address.
        const auto depends = [run](const at::Tensor& operand) { return run->from_inputs_.contains(storage_of(operand)); };
        if (std::ranges::any_of(operands, depends)) {
          run->from_inputs_.insert(storage);
        } else if (is_new) {
          run->from_inputs_.erase(storage);
        }
        if (!is_new) continue;
        run->own_.insert(storage);
        run->foreign_.erase(storage);
      }
    });
  }
}

void FirstRun::run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) {
  const auto base = stack.size() - op.arguments;
  const bool updates = op.updates_statistics && stack[base + OperatorFacts::kTraining].toBool();
  std::vector<at::Tensor> operands;
  std::vector<bool> written;
  for (size_t i = 0; i < op.arguments; i++) {
    for_each_tensor(stack[base + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      operands.push_back(tensor);
      written.push_back(op.writes[i] || (updates && (i == OperatorFacts::kRunningMean || i == OperatorFacts::kRunningMean + 1)));
      note_operand(tensor, written.back(), op);
    });
  }
  if (is_of_program(op)) note_course(op, stack, operands, written);
  if (!keeps(op)) {
    handle.redispatchBoxed(below, &stack);
    return note_results(stack, base, operands);
  }
  auto& kept = log_->kept.emplace_back();
  kept.step = log_->course.steps() - 1;
  keeping_ = &kept;
  operands_ = &operands;
  try {
    handle.redispatchBoxed(below, &stack);
  } catch (...) {
    keeping_ = nullptr;
    kept.runs_again = true;  // and fails again
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

LaterRun::LaterRun(std::shared_ptr<Log> log, Segment* filled) : SegmentRun(std::move(log)), filled_(filled), follower_(log_->course) {
  make_copies();
}

LaterRun::LaterRun(std::shared_ptr<Log> log, LaterRun* outer)
    : SegmentRun(std::move(log)), filled_(nullptr), outer_(outer), follower_(log_->course) {
  make_copies();
}

LaterRun::~LaterRun() = default;

void LaterRun::make_copies() {
  const Aside aside;
  for (const auto& write : log_->writes) {
    if (auto storage = write.storage.lock()) copies_.push_back({.storage = std::move(storage), .bytes = write.before.clone()});
  }
}

std::unique_ptr<SegmentRun> LaterRun::inner(const Options&, const std::vector<at::Tensor>& inputs, detail::Again,
                                            const torch::nn::Module*) {
  for (const auto& input : inputs) save(input);
  if (inner_ == log_->inner.size()) refuse_other_course();
  return std::unique_ptr<SegmentRun>(new LaterRun(log_->inner[inner_++], this));
}

void LaterRun::result(at::Tensor& tensor) const {
  // Without its graph, which would keep the activations of the inner segment.
  tensor = stand_in(tensor, tensor.requires_grad());
}

bool LaterRun::asked_runs_again() {
  follower_.let_leave_out();
  return true;
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
  const auto* const kept = is_of_program(op) ? kept_at(follower_.follow(op, stack, stack.size() - op.arguments)) : nullptr;
  expect_own_writes(op, stack);
  if (kept != nullptr) return repeat_kept(*kept, handle, op, below, stack);
  handle.redispatchBoxed(below, &stack);
}

void LaterRun::expect_own_writes(const OperatorFacts& op, const Stack& stack) const {
  for (size_t i = 0; i < op.arguments; i++) {
    if (!op.writes[i]) continue;
    for_each_tensor(stack[stack.size() - op.arguments + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !log_->own_writes.contains(storage_of(tensor))) return;
      throw UsageError(fmt::format(
          "{} changes a {} tensor of shape [{}] in place that a checkpointed segment has made in forward and kept, so it would change "
          "twice when the segment runs again in backward; make it before the segment, as a constructor does",
          op.name(), c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")));
    });
  }
}

const Log::Kept* LaterRun::kept_at(size_t step) {
  while (kept_ < log_->kept.size() && log_->kept[kept_].step < step) kept_++;
  return kept_ < log_->kept.size() && log_->kept[kept_].step == step ? &log_->kept[kept_] : nullptr;
}

void LaterRun::repeat_kept(const Log::Kept& kept, const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below,
                           Stack& stack) {
  const auto base = stack.size() - op.arguments;
  const auto operands = tensors_on(stack, base);
  if (kept.runs_again) {
    ignores_ = true;
    const auto end = c10::make_scope_exit([&] { ignores_ = false; });
    handle.redispatchBoxed(below, &stack);
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
