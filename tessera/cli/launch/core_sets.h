// Which processor cores each rank of a host gets to itself.
#pragma once

#include <sched.h>

#include <filesystem>
#include <vector>

namespace tessera::cli {

/// The processors that this process may use, in an order in which neighbours share as much as possible: first hardware threads of one core,
/// then cores of one NUMA node. `system` is /sys/devices/system.
std::vector<int> processors_in_order(const std::filesystem::path& system = "/sys/devices/system");

/// A part of the processors for each rank, alike in size up to one, from the first to the last. Where there are more ranks than processors,
/// several ranks share one.
std::vector<std::vector<int>> core_sets(const std::vector<int>& processors, int ranks);

/// The same as the kernel takes it.
cpu_set_t to_cpu_set(const std::vector<int>& processors);

}  // namespace tessera::cli
