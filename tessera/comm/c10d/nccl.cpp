#include "tessera/comm/c10d/nccl.h"

#include <c10/cuda/CUDAFunctions.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/base/error.h"
#include "tessera/base/launcher.h"

namespace tessera {

int gpus_here() {
  return c10::cuda::device_count();
}

c10::Device own_gpu() {
  const int number = local_rank_from_environment().value_or(0), gpus = gpus_here();
  if (number >= gpus) {
    throw ConfigError(fmt::format("transport nccl: rank {} of this host has no GPU of its own; there are {}", number, gpus));
  }
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(number));
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number)};
}

BackendPtr make_nccl(const StorePtr& store, int rank, int size, std::chrono::milliseconds limit) {
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = limit;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

}  // namespace tessera
