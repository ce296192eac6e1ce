#include "tessera/train/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>

#include "tessera/train/report.h"

namespace tessera::train {
namespace {

/// Reads a line such as "VmRSS:     3124 kB" of /proc/self/status; NaN if there is none.
double bytes_of_status(std::string_view name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(name)) continue;
    const auto kilobytes = leading_number(std::string_view(line).substr(std::min(line.size(), line.find_first_of("0123456789"))));
    if (kilobytes) return 1024.0 * static_cast<double>(*kilobytes);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

Value memory() {
  return {.name = "memory", .value = bytes_of_status("VmRSS:"), .unit = Unit::Bytes};
}

Value peak_memory() {
  return {.name = "peak_memory", .value = bytes_of_status("VmHWM:"), .unit = Unit::Bytes};
}

}  // namespace tessera::train
