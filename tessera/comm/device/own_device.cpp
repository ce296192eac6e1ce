#include "tessera/comm/device/own_device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

/// Why operators can't run on the device, in libtorch's words; nothing if they can.
std::optional<std::string> why_unusable(c10::Device device) {
  try {
    at::zeros({1}, at::TensorOptions(device)).add_(1);
    return std::nullopt;
  } catch (const c10::Error& error) {
    auto why = first_line(error);
    if (why.find("no kernel image") == std::string::npos) return why;
    return why +
           ": this libtorch was not built for GPUs of this kind; install a wheel of torch that supports this GPU, or build torch with "
           "TORCH_CUDA_ARCH_LIST";
  }
}

}  // namespace

c10::Device default_device() {
  const auto name = env("TESSERA_DEVICE");
  if (!name) return c10::kCPU;
  try {
    return c10::Device(*name);
  } catch (const c10::Error&) {
    throw ConfigError(
        "TESSERA_DEVICE='{}' is not a device; set it to cpu, cuda, cuda:1 or xla (for TPUs, also set TESSERA_PJRT_PLUGIN=tpu)", *name);
  }
}

int devices_here(c10::DeviceType type) {
  if (type == c10::kCPU) return 1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

std::string why_none_of(std::string_view kind) {
  if (kind != "xla")
    return "the libtorch of this program does not support such devices; build Tessera with TESSERA_LINK_CUDA=ON and a libtorch with CUDA";
  return "this program has no XLA devices; link it with tessera::xla, which is built if the package xla-cpu-pjrt is installed next to libtorch: "
         "build/python/bin/pip install --no-deps xla-cpu-pjrt, then cmake --preset release && cmake --build build; ./check does all of it";
}

c10::Device own_device(c10::Device wanted, int local_rank) {
  if (wanted.is_cpu()) return wanted;
  const auto type = wanted.type();
  const auto name = c10::DeviceTypeName(type, /*lower_case=*/true);
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    throw ConfigError("device {}: {}; or train on the CPU: unset TESSERA_DEVICE, or give --device cpu", name, why_none_of(name));
  }
  const int count = devices_here(type);
  if (count == 0) throw ConfigError("device {}: there is none here: {}", name, why_unusable(c10::Device(type, 0)).value_or(""));
  const auto index = wanted.has_index() ? wanted.index() : static_cast<c10::DeviceIndex>(local_rank % count);
  if (index >= count) throw ConfigError("device {}:{}: there are {} here, numbered from 0", name, index, count);
  const c10::Device own(type, index);
  static std::atomic<bool> is_usable = false;  // checked once, because all devices of a host are nearly always of one kind
  if (!is_usable) {
    if (const auto why = why_unusable(own)) throw ConfigError("device {}: {}", own.str(), *why);
    is_usable = true;
  }
  return own;
}

std::string name_on_host(c10::Device device) {
  const auto visible = device.is_cuda() ? env("CUDA_VISIBLE_DEVICES") : std::nullopt;
  if (!visible) return device.str();
  std::string_view rest = *visible;
  for (int i = 0; i < device.index() && !rest.empty(); i++) rest.remove_prefix(std::min(rest.find(','), rest.size() - 1) + 1);
  return fmt::format("GPU {}", rest.substr(0, rest.find(',')));
}

void make_current(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace tessera
