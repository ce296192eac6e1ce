// Device guard, hooks and operators of the test devices, which have one device each.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace tessera::testing {

struct OneDeviceGuard : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kType = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Device device() { return {kType, 0}; }
};

struct OneDeviceHooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {  // torch::manual_seed asks for it
    static const auto generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
};

template <class Memory>
at::Tensor strided_in(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                      std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/) {
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &Memory::instance(), kKeys, c10::dtype_or_default(dtype));
}

template <class Memory>
at::Tensor empty_in(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                    std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &Memory::instance(), kKeys, c10::dtype_or_default(dtype), format);
}

/// Registers the device's allocator, guard and hooks, operators that need no values, and a fallback for all other operators. Libtorch never
/// frees them. Returns the library in which the device registers operators of its own.
template <class Memory, auto kFallback>
torch::Library& register_device(const char* name, OneDeviceGuard* guard, OneDeviceHooks* hooks) {
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  c10::register_privateuse1_backend(name);
  c10::SetAllocator(OneDeviceGuard::kType, &Memory::instance());
  static const c10::impl::DeviceGuardImplRegistrar registrar(OneDeviceGuard::kType, guard);
  at::RegisterPrivateUse1HooksInterface(hooks);
  static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<kFallback>());
  static torch::Library aten(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  aten.impl("empty.memory_format", &empty_in<Memory>);
  aten.impl("empty_strided", &strided_in<Memory>);
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  return aten;
}

/// Returns an operand or a result for another device: `map` converts each tensor in it.
template <class Map>
c10::IValue mapped(const c10::IValue& value, c10::DeviceType device, const Map& map) {
  if (value.isDevice()) return c10::Device(device);
  if (value.isTensor()) return map(value.toTensor());
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) tensors.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return tensors;
  }
  if (!value.isTensorList()) return value;
  auto tensors = value.toTensorVector();
  for (auto& tensor : tensors) tensor = map(tensor);
  return tensors;
}

/// Pushes the operands that an operator returns for a result that it has written.
inline void push_written(const c10::OperatorHandle& op, size_t result, const std::vector<c10::IValue>& operands, torch::jit::Stack& stack) {
  const auto* written = op.schema().returns()[result].alias_info();
  for (size_t i = 0; i < operands.size(); i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && *alias == *written) stack.push_back(operands[i]);
  }
}

}  // namespace tessera::testing
