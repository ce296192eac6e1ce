// Runs operators without a lowering on the CPU, once for each replica.
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using c10::IValue;
using torch::jit::Stack;

/// Replaces each tensor of an argument, which may be a list, by the result of `change`.
template <class Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = change(tensor);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) tensors.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const IValue& value) {
  std::vector<at::Tensor> tensors;
  (void)with_tensors(value, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
  return tensors;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

void expect_no_view(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      throw UsageError("XLA devices have no lowering of {}, and its view can't be computed on the CPU, because later writes to the view would be lost: use "
                       "an operator that returns a copy",
                       toString(op.operator_name()));
    }
  }
}

/// Makes one result of the results of all replicas.
IValue merged(const std::vector<IValue>& values, const std::string& name) {
  const auto& first = values.front();
  const auto all = [&](const auto& tensor_of) -> at::Tensor {
    std::vector<at::Tensor> tensors;
    for (const auto& value : values) tensors.push_back(tensor_of(value));
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || tensor.sizes() == tensors[0].sizes()) continue;
      throw UsageError(
          "{} makes a tensor of sizes {} on one replica and of sizes {} on another, but a tensor has the same shape on all replicas: instead of "
          "x[mask], use an operator that keeps the shape, such as where() or masked_fill()",
          name, c10::str(tensors[0].sizes()), c10::str(tensor.sizes()));
    }
    if (tensors[0].defined() && tensors[0].layout() != at::kStrided) {
      throw UsageError("{} made a tensor of layout {}, which XLA devices do not have", name, c10::str(tensors[0].layout()));
    }
    return tensors[0].defined() ? from_replicas(tensors) : at::Tensor();
  };
  if (first.isTensor()) return all([](const IValue& value) { return value.toTensor(); });
  if (first.isTensorList()) {
    std::vector<at::Tensor> list;
    for (size_t i = 0; i < first.toTensorVector().size(); i++) {
      list.push_back(all([&](const IValue& value) { return value.toTensorVector().at(i); }));
    }
    return list;
  }
  return first;
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto lock = lock_device();
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  expect_no_view(op);
  const auto name = toString(op.operator_name());
  if (runner().metrics().fallbacks[name]++ == 0)
    log(LogLevel::Warning, "XLA: {} has no lowering for these arguments and runs on the CPU, so the traced program ends before it", name);
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto count = static_cast<size_t>(runner().replicas());
  std::vector<Stack> of_replica(count);
  for (const auto& argument : arguments) {
    if (argument.isDevice()) {
      expect_the_device(argument.toDevice());
      for (auto& own : of_replica) own.emplace_back(c10::Device(at::kCPU));
      continue;
    }
    // Each tensor is downloaded once, for all replicas.
    std::vector<std::vector<at::Tensor>> downloaded;
    (void)with_tensors(argument, [&](const at::Tensor& tensor) {
      downloaded.push_back(is_xla(tensor) ? replicas(tensor, "") : std::vector(count, tensor));
      return tensor;
    });
    for (size_t r = 0; r < count; r++) {
      size_t next = 0;
      of_replica[r].push_back(with_tensors(argument, [&](const at::Tensor&) { return downloaded[next++][r]; }));
    }
  }
  std::vector<std::vector<IValue>> results(schema.returns().size());
  for (auto& own : of_replica) {
    auto call = own;
    try {
      op.callBoxed(&call);
    } catch (const c10::NotImplementedError& error) {
      throw UsageError("XLA devices have no lowering of {}, and the CPU has no kernel for it either: {}", name,
                       error.what_without_backtrace());
    }
    for (size_t i = 0; i < results.size(); i++) results[i].push_back(call[i]);
  }
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!writes(schema.arguments()[i])) continue;
    std::vector<std::vector<at::Tensor>> written(count);
    for (size_t r = 0; r < count; r++) written[r] = tensors_in(of_replica[r][i]);
    const auto targets = tensors_in(arguments[i]);
    for (size_t k = 0; k < targets.size(); k++) {
      if (!is_xla(targets[k])) continue;
      std::vector<at::Tensor> values;
      for (const auto& own : written) values.push_back(own[k]);
      if (targets[k].sizes() != values[0].sizes()) targets[k].resize_(values[0].sizes());
      write(targets[k], read(from_replicas(values)));
    }
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto* const written = schema.returns()[i].alias_info();
    if (!written) {
      stack->push_back(merged(results[i], name));
      continue;
    }
    for (size_t k = 0; k < arguments.size(); k++) {
      const auto* const alias = schema.arguments()[k].alias_info();
      if (alias && *alias == *written) stack->push_back(arguments[k]);
    }
  }
}

void register_fallback() {
  auto& library = library_of("_", c10::DispatchKey::PrivateUse1);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace tessera::xla
