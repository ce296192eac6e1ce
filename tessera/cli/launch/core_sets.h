// Divides the processor cores of a host among its ranks.
#pragma once

#include <sched.h>

#include <filesystem>
#include <vector>

namespace tessera::cli {

/// Returns the processors that this process may use, ordered so that neighbours share as much hardware as possible: first the threads of one
/// core, then the cores of one NUMA node. `system` is /sys/devices/system.
std::vector<int> processors_in_order(const std::filesystem::path& system = "/sys/devices/system");

/// Divides the processors, in their order, into one part for each rank. The sizes of parts differ by one at most. If there are more ranks
/// than processors, several ranks share a processor.
std::vector<std::vector<int>> core_sets(const std::vector<int>& processors, int ranks);

/// Returns the processors as the set that sched_setaffinity() takes.
cpu_set_t to_cpu_set(const std::vector<int>& processors);

}  // namespace tessera::cli
