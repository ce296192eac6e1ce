#include "tessera/xla/device/kernels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/ops.h"

namespace tessera::xla {
namespace {

std::map<std::string, Lowering>& lowerings() {
  static auto& all = *new std::map<std::string, Lowering>;
  return all;
}

torch::Library& library() {
  static auto& aten = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  return aten;
}

/// The one kernel of all operators in tables: which it is stands in the functor.
class Lowered final : public c10::OperatorKernel {
 public:
  explicit Lowered(Lowering lower) : lower_(lower) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    const auto lock = lock_device();
    Call call(op, *stack);
    lower_(call);
  }

 private:
  Lowering lower_;
};

}  // namespace

Call::Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : name_(op.schema().name()), stack_(stack), returns_(op.schema().returns().size()) {
  const auto& schema = op.schema();
  arguments_ = torch::jit::pop(stack, schema.arguments().size());
  for (size_t i = 0; i < arguments_.size(); i++) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments_[i].isTensor()) outs_.push_back(arguments_[i].toTensor());
  }
  // Those that the caller gave only to be written are no arguments.
  while (!arguments_.empty() && schema.arguments()[arguments_.size() - 1].is_out()) arguments_.pop_back();
}

Sizes Call::integers(size_t i) const {
  if (arguments_[i].isNone()) return {};
  if (arguments_[i].isInt()) return {arguments_[i].toInt()};
  return arguments_[i].toIntVector();
}

Value Call::value(size_t i) const {
  if (arguments_[i].isScalar()) {
    const auto scalar = arguments_[i].toScalar();
    if (scalar.isFloatingPoint()) return hlo::scalar(scalar.toDouble(), at::kFloat);
    return hlo::constant(scalar.toLong(), scalar.isBoolean() ? at::kBool : at::kLong);
  }
  return read(tensor(i));
}

Value Call::value(size_t i, at::ScalarType element) const {
  if (arguments_[i].isScalar()) return hlo::scalar(number(i), element);
  return hlo::convert(read(tensor(i)), element);
}

at::ScalarType Call::result_type(size_t i) const {
  if (const auto* const tensor = out(i)) return tensor->scalar_type();
  for (const auto& argument : arguments_) {
    if (argument.isTensor() && argument.toTensor().defined()) return argument.toTensor().scalar_type();
  }
  return at::kFloat;
}

void Call::give(std::span<const Value> results) {
  for (size_t i = 0; i < returns_; i++) {
    if (i >= results.size() || !results[i]) {
      stack_.emplace_back(at::Tensor());
      continue;
    }
    const auto* const given = out(i);
    if (!given) {
      stack_.emplace_back(new_tensor(results[i]));
      continue;
    }
    if (given->sizes() != results[i].sizes()) given->resize_(results[i].sizes());
    write(*given, results[i]);
    stack_.emplace_back(*given);
  }
}

void add_kernels(std::span<const Kernel> kernels) {
  for (const auto& kernel : kernels) {
    lowerings()[kernel.name] = kernel.lower;
    library().impl(kernel.name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Lowered>(kernel.lower)));
  }
}

std::vector<std::string> lowered_operators() {
  std::vector<std::string> names;
  for (const auto& [name, lower] : lowerings()) names.push_back(name);
  return names;
}

void register_kernels() {
  register_fallback();
  register_plumbing();
  register_elementwise();
  register_reductions();
  register_products();
  register_convolutions();
  register_random();
  register_indexing();
}

}  // namespace tessera::xla
