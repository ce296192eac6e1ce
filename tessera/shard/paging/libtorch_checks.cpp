#include "tessera/shard/paging/libtorch_checks.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/loaded_libtorch.h"
#include "tessera/shard/dispatch/operators.h"
#include "tessera/shard/dispatch/watcher.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {
namespace {

namespace ag = torch::autograd;

/// On the CPU, whatever device the program uses.
at::Tensor two_ones() {
  return at::ones({1, 2}, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
}

// By a replaced operator, because the first product or sum of a process takes longer than all checks. The checks below have exp and zero_
// for the same reason.
bool calls_the_fallback_of_an_operand() {
  const auto weight = paged_alias(two_ones()), instead = two_ones();
  WeightMeta::of(weight).instead = std::make_shared<const WeightOperator>(
      [&](std::string_view, std::span<const c10::IValue>) { return std::optional<at::Tensor>(instead); });
  return at::linear(two_ones(), weight).is_same(instead);
}

class CountingWatcher final : public Watcher {
 public:
  bool opens(const OperatorFacts& /*op*/, c10::DispatchKeySet /*keys*/) const override { return false; }
  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, torch::jit::Stack& stack) override {
    calls += op.name() == "aten::exp" && below.has(c10::DispatchKey::AutogradCPU) ? 1 : 100;
    handle.redispatchBoxed(below, &stack);
  }
  at::Tensor instead_of(const at::Tensor& operand) const override { return operand; }
  void replaced(const at::Tensor& /*operand*/, const at::Tensor& /*by*/) override {}

  int calls = 0;
};

bool calls_the_fallback_of_a_thread() {
  const auto plain = two_ones();
  CountingWatcher watcher;
  {
    const Watching watching(&watcher);
    if (Watcher::current() != &watcher) return false;
    plain.exp();
  }
  plain.exp();
  return watcher.calls == 1 && Watcher::current() == nullptr;
}

template <class Act>
bool is_refused(const Act& act, std::string_view words) {
  try {
    act();
  } catch (const c10::Error& error) {
    return error.msg().find(words) != std::string::npos;  // what() would look for the names of all callers
  }
  return false;
}

bool guards_storages() {
  constexpr const char* kWords = "a storage without memory";
  const auto tensor = two_ones();
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  compat::guard_storage(storage, kWords);
  compat::unguard_storage(storage);
  if (tensor.mutable_data_ptr<float>() == nullptr) return false;
  compat::guard_storage(storage);
  return is_refused([&] { (void)tensor.const_data_ptr<float>(); }, kWords);
}

bool tells_of_writes() {
  if (!compat::kTellsOfWrites) return true;
  static thread_local int told = 0;
  told = 0;
  const auto tensor = two_ones();
  compat::tell_of_write(*tensor.storage().unsafeGetStorageImpl(), [](c10::StorageImpl*) { told++; });
  (void)tensor.exp();
  if (told != 0) return false;
  tensor.zero_();
  tensor.zero_();
  return told == 1;
}

struct PassingNode final : ag::Node {
  PassingNode() : Node(UINT64_MAX) {}
  ag::variable_list apply(ag::variable_list&& gradients) override { return std::move(gradients); }
};

bool leads_graphs_to_nodes() {
  const compat::NodePtr node = compat::make_node<PassingNode>();
  const auto parameter = paged_alias(two_ones()), leaf = two_ones().requires_grad_();
  ag::impl::set_gradient_edge(parameter, ag::Edge(node, 0));
  const auto of_parameter = parameter.exp().grad_fn(), of_leaf = leaf.exp().grad_fn();
  if (!of_parameter || !of_leaf) return false;
  const auto* const accumulate = dynamic_cast<const ag::AccumulateGrad*>(of_leaf->next_edge(0).function.get());
  return of_parameter->next_edge(0).function == node && node->sequence_nr() == UINT64_MAX && accumulate != nullptr &&
         accumulate->variable.is_same(leaf);
}

bool counts_versions() {
  const auto weight = two_ones();
  WeightMeta::of(weight);
  const auto view = weight.view({2});
  const auto before = view._version();
  weight.zero_();
  return view._version() == before + 1 && weight_meta(weight) != nullptr && weight_meta(view) == nullptr;
}

}  // namespace

std::span<const LibtorchCheck> libtorch_checks() {
  static constexpr LibtorchCheck kChecks[] = {
      {"call the fallback of the DeferredInit key for an operand that has the key",
       "parameters that are gathered when they are used", &calls_the_fallback_of_an_operand},
      {"call the fallback of the DeferredInit key, before autograd, for a thread that includes the key",
       "deferred_init and activation checkpointing", &calls_the_fallback_of_a_thread},
      {"refuse pointers to a storage that has no memory", "parameters that are sharded", &guards_storages},
      {"report a request for writable memory", "writes through raw pointers", &tells_of_writes},
      {"lead the graph of an operator to the node of its operand", "the reduction of gradients", &leads_graphs_to_nodes},
      {"count versions of a tensor with an AutogradMeta of its own", "changes between forward and backward", &counts_versions},
  };
  return kChecks;
}

void expect_sound_libtorch(std::span<const LibtorchCheck> checks) {
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode grad(true);
  const Watching nobody(nullptr);
  std::string faults;
  for (const auto& check : checks) {
    std::string why;
    try {
      if (check.holds()) continue;
    } catch (const std::exception& error) {
      why = fmt::format(" ({})", first_line(error));
    }
    faults += fmt::format("{}{}{}, which Tessera needs for {}", faults.empty() ? "" : "; it does not ", check.fault, why, check.needed_for);
  }
  if (faults.empty()) return;
  throw UsageError(
      "libtorch {} does not {}. Use libtorch 2.11 to 2.14 as PyTorch's wheels have it, and build Tessera with the same one; a library in "
      "this process that changes libtorch's dispatcher, engine or allocator may also be the cause (docs/libtorch.md)",
      loaded_libtorch(), faults);
}

}  // namespace tessera
