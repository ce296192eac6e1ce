#include "tessera/xla/pjrt/gpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <regex>

#include "tessera/base/error.h"

namespace tessera::pjrt {
namespace {

/// The data sheet of a GPU.
struct Gpu {
  std::string_view name;
  int capability, cores, units_of_core;
  double gigahertz;
  int64_t memory, bandwidth, cache, shared_memory, most_shared_memory;  // sizes in bytes; bandwidth in bytes per second
};

constexpr std::array kGpus = {
    Gpu{"a100", 8, 108, 64, 1.41, 85'050'654'720, 2'039'000'000'000, 41'943'040, 167'936, 166'912},
    Gpu{"h100", 9, 132, 128, 1.98, 84'978'434'048, 3'352'000'000'000, 52'428'800, 233'472, 232'448},
    Gpu{"h200", 9, 132, 128, 1.98, 150'000'000'000, 4'800'000'000'000, 52'428'800, 233'472, 232'448},
    Gpu{"b200", 10, 148, 128, 1.96, 191'000'000'000, 8'000'000'000'000, 132'120'576, 233'472, 232'448},
};

/// A GpuTargetConfigProto, as text.
std::string target_of(const Gpu& gpu) {
  return fmt::format(
      R"(gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {} fpus_per_core: {}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {} shared_memory_per_block_optin: {} memory_bandwidth: {} l2_cache_size: {}
  clock_rate_ghz: {} device_memory_size: {} cuda_compute_capability {{ major: {} }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 }} device_description_str: "{}")",
      gpu.cores, gpu.units_of_core, gpu.shared_memory, gpu.most_shared_memory, gpu.bandwidth, gpu.cache, gpu.gigahertz, gpu.memory, gpu.capability, gpu.name);
}

/// Whether a shape is written as "1x16x8".
bool is_shape(const std::string& shape) {
  static const std::regex form("[1-9][0-9]*(x[1-9][0-9]*){2}");
  return std::regex_match(shape, form);
}

}  // namespace

std::optional<GpuTopology> gpu_topology(std::string_view name) {
  const auto kind = name.substr(0, name.find(':'));
  const auto* const gpu = std::ranges::find(kGpus, kind, &Gpu::name);
  if (gpu == kGpus.end()) return {};
  const std::string shape(name.substr(std::min(kind.size() + 1, name.size())));
  if (!is_shape(shape)) {
    throw ConfigError("the topology '{}' does not say how many slices, hosts and devices per host there are: write {}:1x2x8", name,
                      gpu->name);
  }
  return GpuTopology{.options = {{"target_config", target_of(*gpu)}, {"topology", shape}}, .memory = gpu->memory};
}

}  // namespace tessera::pjrt
