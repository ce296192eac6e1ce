#include "tessera/shard/activation/segment_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/shard/dispatch/operators.h"

namespace tessera::activation {
namespace {

namespace ag = torch::autograd;

/// Takes the place of one saved tensor in the graph.
class SavedHooks final : public ag::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    const Watcher::Turn watcher;
    auto* const pass = dynamic_cast<SegmentPass*>(watcher.get());
    saved_ = pass != nullptr ? pass->save(tensor) : SavedTensor::in_memory(tensor);  // `pass` is null if the segment has failed meanwhile
  }
  at::Tensor call_unpack_hook() override { return saved_.get(); }

 private:
  SavedTensor saved_;
};

/// Autograd asks the process's engine for hooks on a tensor that it saves, and C++ has no other access to these hooks. For everything else,
/// SavingEngine calls the engine that was set before; it has no threads and runs no nodes itself.
class SavingEngine final : public ag::Engine {
 public:
  explicit SavingEngine(Engine& before) : before_(before) {}

  ag::variable_list execute(const ag::edge_list& roots, const ag::variable_list& inputs, bool keep_graph, bool create_graph,
                            bool accumulate_grad, const ag::edge_list& outputs) override {
    return before_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<ag::GraphTask>& task, compat::NodePtr root,
                                                                 ag::InputBuffer&& input) override {
    return before_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<ag::AnomalyMetadata> make_anomaly_metadata() override { return before_.make_anomaly_metadata(); }

  std::unique_ptr<ag::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (SegmentPass::current() != nullptr) return std::make_unique<SavedHooks>();
    return before_.get_default_saved_variable_hooks();
  }

 private:
  Engine& before_;
};

std::atomic<SavingEngine*> installed = nullptr;

/// Another library may install its own engine at any time, as Python does when it is loaded; a new SavingEngine then wraps that one.
void install_engine() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& now = ag::Engine::get_default_engine();
  if (&now == installed) return;
  installed = new SavingEngine(now);  // never destroyed, because nodes run after main, too
  ag::set_default_engine_stub([]() -> ag::Engine& { return *installed.load(); });
}

}  // namespace

SegmentPass::SegmentPass(std::shared_ptr<ForwardRecord> record)
    : record_(std::move(record)), graph_task_(ag::get_current_graph_task_id()), watching_(this) {
  install_engine();
}

void SegmentPass::replaced(const at::Tensor& operand, const at::Tensor& by) {
  replacements_.insert_or_assign(storage_of(by), Replacement{.by = by, .operand = WeakTensor(operand)});
}

at::Tensor SegmentPass::given_by_program(const at::Tensor& tensor) const {
  const auto found = replacements_.find(storage_of(tensor));
  if (found == replacements_.end()) return tensor;
  auto operand = found->second.operand.lock();
  return operand.defined() ? operand : tensor;
}

bool SegmentPass::is_of_program(const OperatorFacts& op) const {
  return !op.writes_no_values && !is_casting() && ag::get_current_graph_task_id() == graph_task_;
}

bool SegmentPass::keeps(const OperatorFacts& op) const {
  if (!record_->keep || op.views || !is_of_program(op)) return false;
  return std::ranges::none_of(op.writes, [](bool writes) { return writes; }) && !op.updates_statistics && record_->keep(op.name());
}

bool SegmentPass::opens(const OperatorFacts& op, c10::DispatchKeySet keys) const {
  // Operators with running statistics or recurrent weights are not opened: paging and SegmentForward recognise their side effects only by
  // the whole operator.
  return record_->keep && op.implicit_autograd && op.is_composite(keys) && !op.updates_statistics && !op.recurrent && !op.views && !keeps(op);
}

}  // namespace tessera::activation
