#include "tessera/xla/device/device.h"

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/move_module.h"
#include "tessera/base/tied.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/random.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/ties.h"
#include "tessera/xla/device/wait_at_end.h"
#include "tessera/xla/metrics.h"

namespace tessera::xla {
namespace {

const c10::Device kDevice(kXla, 0);
constexpr int64_t kMostReplicas = 1'000'000;

/// One device and one stream. Programs start in the order in which they were traced, so nothing ever waits on an event.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kXla; }
  c10::Device exchangeDevice(c10::Device device) const override {
    expect_the_device(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { expect_the_device(device); }
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*device*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream /*stream*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** /*event*/, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*device*/) const noexcept override {}
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    expect_the_device(c10::Device(kXla, device));
    return device_generator();
  }
  /// Returns an allocator of plain memory in place of pinned memory: copies between host and device block in any case.
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void* /*data*/) const override { return false; }
  c10::Device getDeviceFromPtr(void* /*data*/) const override { return kDevice; }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override { return device_generator().clone(); }
};

/// Starts autograd's threads for devices, unless a backward pass has started them, and tells whether there are any. libtorch starts them
/// once in a process, one for each device that exists then; a device that is made later has no thread for its backward passes.
class BackwardThreads : public torch::autograd::Engine {
 public:
  static bool have_started() {
    auto& engine = get_default_engine();
    engine.initialize_device_threads_pool();
    return !(engine.*(&BackwardThreads::device_ready_queues_)).empty();
  }
};

}  // namespace

at::Device make_device(const XlaOptions& options) {
  static bool made = false;
  if (made) throw UsageError("this process has its XLA device already: call tessera::xla::init only once");
  static const c10::impl::DeviceGuardImplRegistrar guard(kXla, new Guard);
  if (!BackwardThreads::have_started()) {
    throw UsageError("a backward pass ran before the XLA device was there, but libtorch starts its threads for devices only in the first backward pass of "
                     "a process: call tessera::xla::init before that pass");
  }
  if (options.devices < 0) throw UsageError("{} XLA devices are asked for: give a positive number, or 0 for all devices", options.devices);
  static const bool wants_report = env_int("TESSERA_XLA_METRICS", 0, 1).value_or(0) == 1;
  const auto traced = env_int("TESSERA_XLA_TRACE_ONLY", 1, kMostReplicas);
  if (traced || options.programs == Programs::Traced) {
    start_runner(ProgramRunner(std::nullopt, traced ? static_cast<int>(*traced) : std::max(options.devices, 1)));
  } else {
    const pjrt::Client client(options.plugin.empty() ? pjrt::Plugin::load() : pjrt::Plugin::load(options.plugin), {.devices = std::max(options.devices, 1)});
    start_runner(ProgramRunner(client, options.devices > 0 ? options.devices : static_cast<int>(client.devices().size())));
  }
  made = true;
  wait_at_end_of_thread([] { runner().wait(); });
  static const auto process = ::getpid();
  std::atexit([] {
    if (::getpid() != process) return;  // a forked child has no device
    runner().finish();
    if (wants_report) std::fputs(metrics_report().c_str(), stderr);
  });
  c10::register_privateuse1_backend("xla");
  c10::SetAllocator(kXla, &LazyMemory::instance());
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // libtorch never frees it
  register_kernels();
  set_tie(kXla, tied_on_device);
  return kDevice;
}

void to_device(ModuleRef module) {
  (void)runner();  // throws if there is no device
  move_module(module, kDevice);
}

}  // namespace tessera::xla
