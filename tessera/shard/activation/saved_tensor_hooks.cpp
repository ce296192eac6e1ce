#include "tessera/shard/activation/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "tessera/base/compat.h"

namespace tessera::activation {
namespace {

namespace ag = torch::autograd;

thread_local SavedTensorHooks* innermost_hooks = nullptr;

/// Autograd asks the process's engine what to do with a tensor that it saves, and that is the only way in from C++. This one leaves
/// everything else to the engine that was there before: it has no threads, and never runs a node.
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
    return innermost_hooks != nullptr ? innermost_hooks->hooks() : before_.get_default_saved_variable_hooks();
  }

 private:
  Engine& before_;
};

std::atomic<SavingEngine*> installed = nullptr;

/// Another library may install an engine of its own at any time, as Python does when it is loaded; ours then goes before that one.
void install() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& now = ag::Engine::get_default_engine();
  if (&now == installed) return;
  installed = new SavingEngine(now);  // never destroyed, because nodes run after main, too
  ag::set_default_engine_stub([]() -> ag::Engine& { return *installed.load(); });
}

}  // namespace

SavedTensorHooks::SavedTensorHooks() : outer_(innermost_hooks) {
  install();
  innermost_hooks = this;
}

SavedTensorHooks::~SavedTensorHooks() {
  innermost_hooks = outer_;
}

}  // namespace tessera::activation
