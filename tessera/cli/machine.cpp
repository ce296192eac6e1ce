// Facts of the machine for `tessera env`: processors, memory and their limits, the system.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>

#include "tessera/base/words.h"
#include "tessera/cli/facts.h"
#include "tessera/cli/launch/ranks_here.h"
#include "tessera/train/report.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// Returns the whole file without white space at its end; nothing if it can't be read.
std::optional<std::string> text_of_file(const fs::path& path) {
  std::ifstream stream(path);
  if (!stream) return std::nullopt;
  std::string text(std::istreambuf_iterator<char>(stream), {});
  text.erase(text.find_last_not_of(" \n\t") + 1);
  return text;
}

/// Returns the values after a name in a file of lines such as "MemTotal:  16384 kB", "model name : ..." or "PRETTY_NAME="..."".
std::vector<std::string> values_in(const fs::path& path, const std::string& name) {
  std::vector<std::string> values;
  std::ifstream stream(path);
  for (std::string line; std::getline(stream, line);) {
    const auto end = line.find_first_of(":=\t");
    if (end == std::string::npos || line.substr(0, end) != name) continue;
    const auto begin = line.find_first_not_of(":=\t \"", end);
    values.push_back(begin == std::string::npos ? "" : line.substr(begin, line.find_last_not_of(" \"") + 1 - begin));
  }
  return values;
}

std::optional<std::string> first_in(const fs::path& path, const std::string& name) {
  const auto values = values_in(path, name);
  return values.empty() ? std::nullopt : std::optional(values.front());
}

/// Returns the number in a line of /proc/meminfo, times `unit`.
std::optional<int64_t> meminfo(const std::string& name, int64_t unit = 1024) {
  const auto number = train::leading_number(first_in("/proc/meminfo", name).value_or(""));
  return number ? std::optional(*number * unit) : std::nullopt;
}

std::optional<std::string> unless_none(size_t count) {
  return count == 0 ? std::nullopt : std::optional(std::to_string(count));
}

Chapter processors() {
  const auto packages = values_in("/proc/cpuinfo", "physical id");
  const auto online = ::sysconf(_SC_NPROCESSORS_ONLN);
  std::error_code unknown;
  size_t nodes = 0;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", unknown)) {
    const auto name = entry.path().filename().string();
    nodes += name.starts_with("node") && train::leading_number(name.substr(4)) ? 1 : 0;
  }
  return {"processors",
          {fact("model", first_in("/proc/cpuinfo", "model name")),
           {"online", online, std::to_string(online)},
           {"usable", cores(), fmt::format("{} (affinity of this process)", cores())},
           fact("sockets", unless_none(std::set<std::string>(packages.begin(), packages.end()).size())),
           fact("numa_nodes", unless_none(nodes))}};
}

Chapter memory_of_host() {
  struct statvfs shm = {};
  const auto of_shm = ::statvfs("/dev/shm", &shm) == 0 ? std::optional(uint64_t{shm.f_blocks} * shm.f_frsize) : std::nullopt;
  const auto pages = meminfo("HugePages_Total", 1), size = meminfo("Hugepagesize");
  return {"memory",
          {bytes_fact("total", meminfo("MemTotal")), bytes_fact("available", meminfo("MemAvailable")),
           bytes_fact("swap", meminfo("SwapTotal")), bytes_fact("/dev/shm", of_shm, "not there"),
           fact("transparent_huge_pages", text_of_file("/sys/kernel/mm/transparent_hugepage/enabled")),
           pages && size ? Fact{"huge_pages", *pages, fmt::format("{} of {}", *pages, size_text(static_cast<double>(*size)))}
                         : fact("huge_pages", {})}};
}

/// Returns the folders of this process's control group and of all groups above it, in version 1 for this controller, and in version 2.
std::vector<fs::path> control_groups(const std::string& controller) {
  std::vector<fs::path> found;
  std::ifstream stream("/proc/self/cgroup");
  for (std::string line; std::getline(stream, line);) {  // "4:memory:/a/b", or "0::/a/b" of version 2
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto names = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_second_version = names == ",,";
    if (!is_second_version && names.find("," + controller + ",") == std::string::npos) continue;
    const fs::path root = is_second_version ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
    for (fs::path own = line.substr(second + 1);; own = own.parent_path()) {
      found.push_back(root / own.relative_path());
      if (!own.has_relative_path()) break;
    }
  }
  return found;
}

/// Returns the least memory limit of this process's control group and of all groups above it.
std::optional<int64_t> memory_limit() {
  constexpr int64_t kNone = int64_t{1} << 60;  // version 1 says "no limit" by a number larger than this
  std::optional<int64_t> least;
  for (const auto& group : control_groups("memory")) {
    for (const auto* name : {"memory.max", "memory.limit_in_bytes"}) {
      const auto limit = train::leading_number(text_of_file(group / name).value_or("max"));
      if (limit && *limit < kNone) least = std::min(*limit, least.value_or(*limit));
    }
  }
  return least;
}

/// Returns how much processor time the control groups allow this process: 1.5 is the time of one and a half processors.
std::optional<double> processor_limit() {
  std::optional<double> least;
  const auto take = [&](const std::string& quota, const std::string& period) {
    const auto part = train::leading_number(quota), whole = train::leading_number(period);
    if (!part || !whole || *part < 0 || *whole <= 0) return;  // -1 is no limit
    const auto limit = static_cast<double>(*part) / static_cast<double>(*whole);
    least = std::min(limit, least.value_or(limit));
  };
  for (const auto& group : control_groups("cpu")) {
    take(text_of_file(group / "cpu.cfs_quota_us").value_or(""), text_of_file(group / "cpu.cfs_period_us").value_or(""));
    const auto both = text_of_file(group / "cpu.max").value_or("");  // "200000 100000" or "max 100000"
    const auto gap = both.find(' ');
    if (gap != std::string::npos) take(both.substr(0, gap), both.substr(gap + 1));
  }
  return least;
}

Fact resource_limit(const std::string& name, decltype(RLIMIT_NOFILE) resource) {
  rlimit limit = {};
  if (::getrlimit(resource, &limit) != 0) return fact(name, {});
  if (limit.rlim_cur == RLIM_INFINITY) return fact(name, {}, "none");
  if (resource == RLIMIT_MEMLOCK) return bytes_fact(name, limit.rlim_cur);
  return {name, limit.rlim_cur, std::to_string(limit.rlim_cur)};
}

Chapter limits() {
  constexpr auto kShare = "processors_of_control_group";
  const auto share = processor_limit();
  return {"limits",
          {bytes_fact("memory_of_control_group", memory_limit(), "none"),
           share ? Fact{kShare, *share, fmt::format("{:.3g}", *share)} : fact(kShare, {}, "none"),
           resource_limit("open_files", RLIMIT_NOFILE), resource_limit("locked_memory", RLIMIT_MEMLOCK)}};
}

Chapter system_of_machine() {
  utsname kernel = {};
  ::uname(&kernel);
  return {"system",
          {fact("name", first_in("/etc/os-release", "PRETTY_NAME")),
           fact("kernel", fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine)),
           fact("libc", fmt::format("glibc {}", ::gnu_get_libc_version()))}};
}

}  // namespace

Fact fact(std::string name, const std::optional<std::string>& value, const std::string& otherwise) {
  if (!value) return {std::move(name), nullptr, otherwise};
  if (is_utf8(*value)) return {std::move(name), *value, printable(*value)};
  std::string shown;
  for (const char c : printable(*value)) shown += (c & 0x80) != 0 ? fmt::format("\\x{:02x}", c & 0xff) : std::string(1, c);
  return {std::move(name), shown, shown};  // JSON strings must be UTF-8
}

Fact bytes_fact(std::string name, std::optional<uint64_t> bytes, const std::string& otherwise) {
  if (!bytes) return fact(std::move(name), {}, otherwise);
  return {std::move(name), *bytes, size_text(static_cast<double>(*bytes))};
}

std::optional<uint64_t> usable_memory() {
  const auto all = meminfo("MemTotal"), limit = memory_limit();
  return all && limit ? std::min(*all, *limit) : limit ? limit : all;
}

std::vector<Chapter> facts_of_machine() {
  return {processors(), memory_of_host(), limits(), system_of_machine()};
}

}  // namespace tessera::cli
