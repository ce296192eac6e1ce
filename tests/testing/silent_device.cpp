#include "tests/testing/silent_device.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "tests/testing/one_device.h"
#include "tests/testing/silent_kernels.h"
#include "tests/testing/silent_memory.h"

namespace tessera::testing {
namespace {

const c10::Device kDevice(kSilent, 0);

/// One device with one stream, on which all work is finished at once.
struct Guard final : OneDeviceGuard {
  c10::Stream getStream(c10::Device /*device*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream /*stream*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  void record(void** /*event*/, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
};

}  // namespace

at::Device silent_device() {
  static const bool registered = [] {
    c10::register_privateuse1_backend("silent");
    c10::SetAllocator(kSilent, &SilentMemory::instance());
    at::RegisterPrivateUse1HooksInterface(new OneDeviceHooks);  // libtorch never frees it
    static const c10::impl::DeviceGuardImplRegistrar guard(kSilent, new Guard);
    register_silent_kernels();
    return true;
  }();
  (void)registered;
  return kDevice;
}

at::Tensor replica(const at::Tensor& tensor, int index) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto* address = storage->_mutable_data_ptr_no_checks().get();
  if (address == nullptr) storage->data_ptr();  // throws with the message of a guarded storage
  at::DataPtr memory(SilentMemory::instance().readable(address, index), at::kCPU);
  const c10::Storage readable(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(memory));
  return at::empty({0}, tensor.options().device(at::kCPU)).set_(readable, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

at::Tensor upload(std::span<const at::Tensor> values) {
  const at::NoGradGuard no_grad;
  const auto& first = values.front();
  auto result = at::empty_like(first, first.options().device(silent_device()));
  for (int r = 0; r < kReplicas; r++) {
    const auto& value = values[static_cast<size_t>(r)];
    TORCH_CHECK(value.sizes() == first.sizes(), "replicas of one tensor have one size, not ", value.sizes(), " and ", first.sizes());
    replica(result, r).copy_(value);
  }
  return result;
}

std::vector<at::Tensor> download(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  count_host_read();
  std::vector<at::Tensor> values;
  for (int r = 0; r < kReplicas; r++) values.push_back(replica(tensor, r).clone());
  return values;
}

void move_to_silent_device(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto move = [](const at::Tensor& tensor) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.to(silent_device()).getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) move(parameter);
  for (const auto& buffer : module.buffers()) move(buffer);
}

}  // namespace tessera::testing
