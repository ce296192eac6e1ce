#include "tessera/cli/launch/core_sets.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <tuple>

namespace tessera::cli {
namespace {

int number_in(const std::filesystem::path& file) {
  int number = 0;
  std::ifstream(file) >> number;
  return number;
}

/// Reads the NUMA node of a processor from a link `nodeN`, which the kernel puts into the processor's folder.
int numa_node_of(const std::filesystem::path& processor) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(processor, ignored)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with("node") && name.find_first_not_of("0123456789", 4) == std::string::npos) return std::stoi(name.substr(4));
  }
  return 0;
}

}  // namespace

std::vector<int> processors_in_order(const std::filesystem::path& system) {
  cpu_set_t usable;
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return {};
  std::vector<std::tuple<int, int, int, int>> places;  // node, package, core, processor
  for (int processor = 0; processor < CPU_SETSIZE; processor++) {
    if (!CPU_ISSET(static_cast<size_t>(processor), &usable)) continue;
    const auto folder = system / "cpu" / fmt::format("cpu{}", processor);
    places.emplace_back(numa_node_of(folder), number_in(folder / "topology/physical_package_id"), number_in(folder / "topology/core_id"),
                        processor);
  }
  std::ranges::sort(places);
  std::vector<int> processors;
  for (const auto& place : places) processors.push_back(std::get<3>(place));
  return processors;
}

std::vector<std::vector<int>> core_sets(const std::vector<int>& processors, int ranks) {
  if (processors.empty()) return {};
  const auto count = processors.size(), parts = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> sets;
  for (size_t rank = 0; rank < parts; rank++) {
    const auto first = rank * count / parts, last = std::max((rank + 1) * count / parts, first + 1);
    sets.emplace_back(processors.begin() + static_cast<std::ptrdiff_t>(first), processors.begin() + static_cast<std::ptrdiff_t>(last));
  }
  return sets;
}

cpu_set_t to_cpu_set(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) CPU_SET(static_cast<size_t>(processor), &set);
  return set;
}

}  // namespace tessera::cli
