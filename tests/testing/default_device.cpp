#include "tests/testing/default_device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/util/signal_handler.h>
#include <torch/library.h>

#include "tessera/base/env.h"
#include "tessera/comm/device/own_device.h"
#include "tests/testing/delayed_device.h"

namespace tessera::testing {
namespace {

/// A static variable of a function, because a global one might be initialized after its value was set.
c10::Device& chosen() {
  static c10::Device device(c10::kCPU);
  return device;
}

/// Where a factory makes its tensor. A tensor in pinned memory is always in host memory.
c10::Device place_by_default(std::optional<at::Device> device, std::optional<bool> pin) {
  return device.value_or(pin.value_or(false) ? c10::Device(c10::kCPU) : chosen());
}

c10::DispatchKeySet below(std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, c10::Device device) {
  return c10::DispatchKeySet(c10::computeDispatchKey(dtype, layout, device));
}

at::Tensor empty_by_default(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                            std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const auto where = place_by_default(device, pin);
  return at::_ops::empty_memory_format::redispatch(below(dtype, layout, where), sizes, dtype, layout, where, pin, format);
}

at::Tensor strided_by_default(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  const auto where = place_by_default(device, pin);
  return at::_ops::empty_strided::redispatch(below(dtype, layout, where), sizes, strides, dtype, layout, where, pin);
}

}  // namespace

bool on_cpu() {
  return env("TESSERA_DEVICE").value_or("cpu") == "cpu";
}

at::Tensor here(const at::Tensor& tensor) {
  return tensor.to(chosen());
}

at::Generator seeded_generator(uint64_t seed) {
  if (chosen().is_cpu()) return at::detail::createCPUGenerator(seed);
  auto generator = at::globalContext().defaultGenerator(chosen()).clone();
  generator.set_current_seed(seed);
  return generator;
}

void use_default_device() {
  if (on_cpu()) return;
  if (env("TESSERA_DEVICE") == "delayed") {
    delayed_device();
    set_lags(false);
  }
  c10::FatalSignalHandler::getInstance().setPrintStackTracesOnFatalSignal(true);
  chosen() = own_device(default_device(), 0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);  // libtorch can't fill tensors of some dtypes
  at::globalContext().setAllowTF32CuDNN(false);
  at::globalContext().setAllowTF32CuBLAS(false);
  // All other factories call these two operators. libtorch warns that its own kernels are replaced, which is intended.
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  aten.impl("empty.memory_format", TORCH_FN(empty_by_default));
  aten.impl("empty_strided", TORCH_FN(strided_by_default));
}

}  // namespace tessera::testing
