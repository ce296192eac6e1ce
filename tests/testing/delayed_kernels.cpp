#include "tests/testing/delayed_kernels.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include "tessera/base/event.h"
#include "tests/testing/delayed_device.h"

namespace tessera::testing {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_delayed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// The memory of a tensor as the device knows it: an address, which nothing keeps alive.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_delayed(tensor)) return tensor;
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto* address = static_cast<char*>(storage->_mutable_data_ptr_no_checks().get());
  if (address == nullptr && storage->nbytes() > 0) storage->data_ptr();  // throws with the message of a guarded storage
  return at::from_blob(address + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor shape_of(const at::Tensor& tensor) {
  return is_delayed(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)) : tensor;
}

template <class Map>
IValue mapped(const IValue& value, c10::DeviceType device, const Map& map) {
  if (value.isDevice()) return c10::Device(device);
  if (value.isTensor()) return map(value.toTensor());
  if (!value.isTensorList()) return value;
  auto tensors = value.toTensorVector();
  for (auto& tensor : tensors) tensor = map(tensor);
  return tensors;
}

at::Tensor on_device(const at::Tensor& shape) {
  return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(delayed_device())) : shape;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  return value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
}

/// Runs the operator on shapes alone, and queues the work.
void queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto operands = torch::jit::pop(*stack, schema.arguments().size());
  Stack shapes;
  for (const auto& value : operands) shapes.push_back(mapped(value, at::kMeta, shape_of));
  auto results = shapes;
  op.callBoxed(&results);
  for (size_t i = 0; i < operands.size(); i++) {  // applies the operator's resizing
    if (operands[i].isTensor() && is_delayed(operands[i].toTensor())) operands[i].toTensor().resize_(shapes[i].toTensor().sizes());
  }
  std::vector<std::vector<at::Tensor>> made(results.size());
  for (size_t i = 0; i < results.size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "the delayed device has no kernel for the view ", op.operator_name());
    if (alias == nullptr) {
      TORCH_CHECK(results[i].isTensor() || results[i].isTensorList(), "the delayed device can't wait for ", op.operator_name());
      stack->push_back(mapped(results[i], at::kMeta, on_device));
      for (const auto& tensor : tensors_of(stack->back())) made[i].push_back(on_host(tensor));
    }
    for (size_t k = 0; alias != nullptr && k < operands.size(); k++) {
      const auto* argument = schema.arguments()[k].alias_info();
      if (argument != nullptr && *argument == *alias) stack->push_back(operands[k]);
    }
  }
  Stack host;
  for (const auto& value : operands) host.push_back(mapped(value, at::kCPU, on_host));
  enqueue([op, host, made] {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto found = host;
    op.callBoxed(&found);
    for (size_t i = 0; i < made.size(); i++) {
      for (size_t k = 0; k < made[i].size(); k++) {
        if (made[i][k].defined()) made[i][k].copy_(tensors_of(found[i])[k]);
      }
    }
  });
}

/// Copies between the device and pinned memory without a wait of the host: the copy reads when the stream gets there.
bool queued_copy(const at::Tensor& source, const at::Tensor& target) {
  const auto& on_the_host = is_delayed(target) ? source : target;
  if (!on_the_host.is_cpu() || !is_pinned(on_the_host.const_data_ptr()) || source.scalar_type() != target.scalar_type()) return false;
  const auto address = [](const at::Tensor& tensor) {
    return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  };
  enqueue([from = is_delayed(source) ? on_host(source) : address(source), to = is_delayed(target) ? on_host(target) : address(target)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  note_use_of_pinned(on_the_host.const_data_ptr());
  return true;
}

at::Tensor copy_delayed(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (non_blocking && queued_copy(source, target)) return target;
  if (!is_delayed(target)) {
    Event::record(delayed_device()).synchronize();
    target.copy_(on_host(source));
    return target;
  }
  enqueue([from = is_delayed(source) ? on_host(source) : source.clone(), to = on_host(target)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  return target;
}

at::Scalar local_scalar_delayed(const at::Tensor& self) {
  Event::record(delayed_device()).synchronize();
  return on_host(self).item();
}

const at::Tensor& resize_delayed(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  if (self.sizes() == sizes) return self;
  auto made = at::empty(sizes, self.options());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

void register_delayed_kernels() {
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_operator>());
  static torch::Library aten(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("resize_", &resize_delayed);
  aten.impl("_copy_from", &copy_delayed);
  aten.impl("_local_scalar_dense", &local_scalar_delayed);
}

}  // namespace tessera::testing
