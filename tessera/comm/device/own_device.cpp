#include "tessera/comm/device/own_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera {

c10::Device default_device() {
  const auto name = env("TESSERA_DEVICE");
  if (!name) return c10::kCPU;
  try {
    return c10::Device(*name);
  } catch (const c10::Error& error) {
    throw ConfigError(fmt::format("TESSERA_DEVICE='{}' names no device: {}; cpu, cuda or cuda:1 would", *name, first_line(error)));
  }
}

int devices_here(c10::DeviceType type) {
  if (type == c10::kCPU) return 1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

c10::Device own_device(c10::Device wanted, int local_rank) {
  if (wanted.is_cpu()) return wanted;
  const auto type = wanted.type();
  const auto name = c10::DeviceTypeName(type, /*lower_case=*/true);
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    throw ConfigError(fmt::format(
        "device {}: the libtorch of this program knows no such devices; build Tessera with TESSERA_LINK_CUDA=ON and a libtorch with CUDA", name));
  }
  const int count = devices_here(type);
  if (count == 0) {
    throw ConfigError(fmt::format("device {}: there is none here, or its driver is missing or too old for this libtorch; nvidia-smi shows both. "
                                  "CUDA_VISIBLE_DEVICES may hide it",
                                  name));
  }
  const auto index = wanted.has_index() ? wanted.index() : static_cast<c10::DeviceIndex>(local_rank % count);
  if (index >= count) throw ConfigError(fmt::format("device {}:{}: there are {} here, numbered from 0", name, index, count));
  const c10::Device own(type, index);
  c10::impl::VirtualGuardImpl(type).setDevice(own);
  return own;
}

}  // namespace tessera
