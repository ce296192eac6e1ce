#include "tests/testing/silent_kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <atomic>

#include "tests/testing/silent_memory.h"

namespace tessera::testing {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<int> reads = 0;

bool is_silent(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSilent;
}

// --- Operators on memory and geometry, which must not go through the fallback ---

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &SilentMemory::instance(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(sizes, strides, &SilentMemory::instance(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<size_t>(impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(SilentMemory::instance().allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return self;
}

// --- Copies between host and device ---

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!is_silent(target)) {
    count_host_read();
    target.copy_(replica(source, 0));
    return target;
  }
  for (int r = 0; r < kReplicas; r++) replica(target, r).copy_(is_silent(source) ? replica(source, r) : source);
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_host_read();
  return replica(self, 0).item();
}

// --- The fallback for everything else: runs the CPU operator once for each replica ---

/// The operand of the CPU operator for one replica. An empty tensor that the operator writes gets new memory, so that it can be resized.
at::Tensor operand(const at::Tensor& tensor, int index, bool written) {
  if (!is_silent(tensor)) return tensor;
  return written && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : replica(tensor, index);
}

IValue operand(const IValue& value, int index, bool written) {
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensor()) return operand(value.toTensor(), index, written);
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = operand(tensor, index, written);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor ? std::optional(operand(*tensor, index, written)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

/// Makes one result on the device from the results of all replicas.
IValue merged(const std::vector<IValue>& values) {
  const auto& first = values.front();
  std::vector<at::Tensor> tensors;
  if (first.isTensor()) {
    if (!first.toTensor().defined()) return first;
    for (const auto& value : values) tensors.push_back(value.toTensor());
    return upload(tensors);
  }
  if (first.isTensorList()) {
    std::vector<at::Tensor> list;
    for (size_t i = 0; i < first.toTensorVector().size(); i++) {
      tensors.clear();
      for (const auto& value : values) tensors.push_back(value.toTensorVector().at(i));
      list.push_back(upload(tensors));
    }
    return list;
  }
  if (!first.isNone()) count_host_read();
  return first;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Resizes an output of the operator if the CPU operator has resized the CPU tensors that stood for it, and copies their values.
void follow(const at::Tensor& target, const std::vector<Stack>& own, size_t argument) {
  if (!is_silent(target) || target.sizes() == own[0][argument].toTensor().sizes()) return;
  target.resize_(own[0][argument].toTensor().sizes());
  for (int r = 0; r < kReplicas; r++) replica(target, r).copy_(own[r][argument].toTensor());
}

void run_on_replicas(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    const bool view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    TORCH_CHECK(!view, "the silent device has no kernel for the view ", op.operator_name(), "; a copy would lose later writes");
  }
  const auto operands = torch::jit::pop(*stack, schema.arguments().size());
  std::vector<Stack> own(kReplicas);
  std::vector<std::vector<IValue>> results(schema.returns().size());
  for (int r = 0; r < kReplicas; r++) {
    for (size_t i = 0; i < operands.size(); i++) own[r].push_back(operand(operands[i], r, writes(schema.arguments()[i])));
    auto stack_of_one = own[r];
    op.callBoxed(&stack_of_one);
    for (size_t i = 0; i < results.size(); i++) results[i].push_back(stack_of_one[i]);
  }
  for (size_t i = 0; i < operands.size(); i++) {
    if (writes(schema.arguments()[i]) && operands[i].isTensor()) follow(operands[i].toTensor(), own, i);
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto* written = schema.returns()[i].alias_info();
    if (written == nullptr) {
      stack->push_back(merged(results[i]));
      continue;
    }
    for (size_t k = 0; k < operands.size(); k++) {
      const auto* alias = schema.arguments()[k].alias_info();
      if (alias != nullptr && *alias == *written) stack->push_back(operands[k]);
    }
  }
}

}  // namespace

void count_host_read() {
  reads++;
}

int host_reads() {
  return reads;
}

void register_silent_kernels() {
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_replicas>());
  static torch::Library aten(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("resize_", &resize);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_local_scalar_dense", &local_scalar);
}

}  // namespace tessera::testing
