#include "tessera/simulate/operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/simulate/shapes.h"

namespace tessera::simulate {
namespace {

using torch::jit::Stack;

// Tensors of up to so many bytes have values: losses, indices, masks.
constexpr size_t kSmall = size_t{64} << 10;

std::map<std::string, int> computed;
OperatorCosts* costs_of_process = nullptr;

/// Convolutions are composites of kernels that only the CPU has.
bool is_convolution(std::string_view name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

/// What is known of an operator before it is called.
struct Known {
  bool is_composite;
  ShapeRule rule;  // null for composites
  bool changes_shape, needs_values;
  bool is_view = false, only_writes = false;  // only_writes: changes values of its arguments, and returns nothing else
  std::optional<size_t> device = {};

  explicit Known(const c10::OperatorHandle& handle)
      : is_composite(!handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_convolution(handle.operator_name().name)),
        rule(is_composite ? nullptr : shape_rule(handle.operator_name().name)),
        changes_shape(handle.hasTag(at::Tag::inplace_view) || handle.operator_name().name.starts_with("aten::resize_") ||
                      handle.operator_name().name == "aten::set_"),
        needs_values(handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape)) {
    const auto& arguments = handle.schema().arguments();
    const auto& returns = handle.schema().returns();
    const auto writes = [](const c10::Argument& one) { return one.alias_info() != nullptr && one.alias_info()->isWrite(); };
    only_writes = std::ranges::any_of(arguments, writes) && std::ranges::none_of(arguments, &c10::Argument::is_out) &&
                  std::ranges::all_of(returns, [](const c10::Argument& one) { return one.alias_info() != nullptr; });
    is_view = std::ranges::any_of(returns, [&](const c10::Argument& one) { return one.alias_info() != nullptr && !writes(one); });
    const auto found = std::ranges::find(arguments, "device", &c10::Argument::name);
    if (found != arguments.end()) device = found - arguments.begin();
  }
};

const Known& known(const c10::OperatorHandle& handle) {
  thread_local std::unordered_map<const void*, Known> all;
  const auto* const key = &handle.schema();
  const auto found = all.find(key);
  return found != all.end() ? found->second : all.emplace(key, Known(handle)).first->second;
}

/// Calls `visit` with each defined tensor of a value. If `visit` returns a tensor, that takes its place.
template <class Visit>
c10::IValue mapped(const c10::IValue& value, const Visit& visit) {
  const auto each = [&](const at::Tensor& tensor) { return tensor.defined() ? visit(tensor) : tensor; };
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(each(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(each(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

class Call {
 public:
  Call(const c10::OperatorHandle& handle, const Known& op, c10::DispatchKeySet below, Stack& stack)
      : handle_(handle), op_(op), below_(below), stack_(stack), base_(stack.size() - handle.schema().arguments().size()),
        given_(stack.begin() + static_cast<std::ptrdiff_t>(base_), stack.end()) {
    for (const auto& value : given_) note(value);
  }

  void run() {
    if (op_.is_view || op_.changes_shape) {
      costs_of_process->add_view();
      return compute();
    }
    const bool is_small = largest_ <= kSmall;
    const bool leaves_out = has_operands_ && !op_.needs_values && find_results(is_small);
    if (!leaves_out) {
      if (!is_small && !op_.needs_values) computed[handle_.operator_name().name]++;
      compute();
      for (size_t i = base_; i < stack_.size(); i++) note(stack_[i]);
    }
    costs_of_process->add(handle_, given_, bytes_, dtype_);
  }

 private:
  void note(const c10::IValue& value) {
    mapped(value, [&](const at::Tensor& tensor) {
      has_operands_ = true;
      const auto size = tensor.has_storage() ? tensor.nbytes() : 0;
      largest_ = std::max(largest_, size);
      bytes_ += static_cast<double>(size);
      if (at::isFloatingType(tensor.scalar_type())) dtype_ = tensor.scalar_type();
      return tensor;
    });
  }

  void compute() {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kSimulationKey);
    handle_.redispatchBoxed(below_, &stack_);
  }

  /// Replaces the arguments by results without values. Returns false, and changes nothing, if the shapes of the results are unknown, or if
  /// operands and results are small.
  bool find_results(bool operands_are_small) {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kSimulationKey);
    Stack results;
    if (op_.only_writes) {
      if (operands_are_small) return false;
      results = written();
    } else {
      if (op_.rule != nullptr) {
        results = op_.rule(given_);
        if (operands_are_small && are_small(results)) return false;
      } else if (!find_by_meta(operands_are_small, results)) {
        return false;
      }
      for (const auto& result : results) note(result);
    }
    stack_.erase(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
    stack_.insert(stack_.end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
    return true;
  }

  /// Calls libtorch's kernel for the meta device.
  bool find_by_meta(bool operands_are_small, Stack& results) const {
    std::vector<std::pair<at::Tensor, at::Tensor>> twins;  // tensors on the meta device, and the tensors for which they stand
    Stack on_meta;
    for (const auto& value : given_) {
      on_meta.push_back(mapped(value, [&](const at::Tensor& tensor) {
        at::Tensor twin = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
        twins.emplace_back(twin, tensor);
        return twin;
      }));
    }
    if (op_.device && on_meta[*op_.device].isDevice()) on_meta[*op_.device] = c10::Device(c10::kMeta);
    try {
      const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      handle_.callBoxed(&on_meta);
    } catch (const std::exception&) {  // no kernel, or wrong operands, which the kernel of the CPU will say
      return false;
    }
    if (operands_are_small && are_small(on_meta)) return false;
    for (const auto& value : on_meta) {
      results.push_back(mapped(value, [&](const at::Tensor& tensor) -> at::Tensor {
        const auto twin = std::ranges::find_if(twins, [&](const auto& pair) { return pair.first.is_same(tensor); });
        if (twin == twins.end()) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        if (twin->second.sizes() != tensor.sizes()) twin->second.resize_(tensor.sizes());  // the operand `out`
        return twin->second;
      }));
    }
    return true;
  }

  static bool are_small(const Stack& values) {
    bool small = true;
    for (const auto& value : values) {
      mapped(value, [&](const at::Tensor& tensor) {
        small = small && static_cast<size_t>(tensor.numel()) * tensor.element_size() <= kSmall;
        return tensor;
      });
    }
    return small;
  }

  /// The results of an operator that returns the arguments which it writes.
  Stack written() const {
    Stack results;
    const auto& schema = handle_.schema();
    size_t next = 0;
    for (const auto& result : schema.returns()) {
      for (; next < given_.size(); next++) {
        const auto* const alias = schema.arguments()[next].alias_info();
        if (alias != nullptr && alias->isWrite() && *alias == *result.alias_info()) break;
      }
      results.push_back(given_.at(next++));
    }
    return results;
  }

  const c10::OperatorHandle& handle_;
  const Known& op_;
  const c10::DispatchKeySet below_;
  Stack& stack_;
  const size_t base_;
  const Stack given_;
  bool has_operands_ = false;
  size_t largest_ = 0;
  double bytes_ = 0;
  at::ScalarType dtype_ = at::kFloat;
};

void on_call(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSimulationKey);
  if (on_operator != nullptr) on_operator(handle, *stack);
  const auto& op = known(handle);
  // A composite calls other operators, each of which comes here, unless it is one such as copy_, which writes its argument itself.
  const bool is_leaf =
      costs_of_process != nullptr && keys.has_backend(c10::BackendComponent::CPUBit) && (!op.is_composite || op.only_writes);
  if (!is_leaf) return handle.redispatchBoxed(below, stack);
  Call(handle, op, below, *stack).run();
}

}  // namespace

void watch_operators() {
  // Not when the library is loaded: a libtorch that takes the key for itself would then refuse the whole library.
  static const auto library = [] {
    torch::Library own(torch::Library::IMPL, "_", kSimulationKey, __FILE__, __LINE__);
    own.fallback(torch::CppFunction::makeFromBoxedFunction<&on_call>());
    return std::make_unique<torch::Library>(std::move(own));
  }();
}

void leave_out_values(OperatorCosts& costs) {
  watch_operators();
  costs_of_process = &costs;
  c10::impl::tls_set_dispatch_key_included(kSimulationKey, true);
}

const std::map<std::string, int>& computed_operators() {
  return computed;
}

}  // namespace tessera::simulate
