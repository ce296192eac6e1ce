// Facts of the machine for `tessera env`: processors, memory and their limits, the system.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <set>

#include "tessera/base/words.h"
#include "tessera/cli/facts.h"
#include "tessera/cli/launch/ranks_here.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// The whole file without white space at its end; nothing if it can't be read.
std::optional<std::string> text_of_file(const fs::path& path) {
  std::ifstream stream(path);
  if (!stream) return std::nullopt;
  std::string text(std::istreambuf_iterator<char>(stream), {});
  text.erase(text.find_last_not_of(" \n\t") + 1);
  return text;
}

/// The values behind a name in a file of lines such as "MemTotal:  16384 kB", "model name : ..." or "PRETTY_NAME="..."".
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

std::optional<uint64_t> number_in(const std::string& text) {
  uint64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  return result.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// A line of /proc/meminfo.
std::optional<uint64_t> meminfo(const std::string& name, uint64_t unit = 1024) {
  const auto values = values_in("/proc/meminfo", name);
  const auto number = values.empty() ? std::nullopt : number_in(values.front());
  return number ? std::optional(*number * unit) : std::nullopt;
}

Fact bytes_or_unknown(const std::string& name, std::optional<uint64_t> bytes) {
  return bytes ? bytes_fact(name, *bytes) : unknown_fact(name);
}

Chapter processors() {
  const auto models = values_in("/proc/cpuinfo", "model name");
  const auto packages = values_in("/proc/cpuinfo", "physical id");
  const auto online = ::sysconf(_SC_NPROCESSORS_ONLN);
  std::error_code unknown;
  int64_t nodes = 0;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", unknown)) {
    const auto name = entry.path().filename().string();
    nodes += name.starts_with("node") && number_in(name.substr(4)) ? 1 : 0;
  }
  Chapter chapter{"processors", {}};
  chapter.facts.push_back(models.empty() ? unknown_fact("model") : fact("model", models.front()));
  chapter.facts.push_back({"online", online, std::to_string(online)});
  chapter.facts.push_back({"usable", cores(), fmt::format("{} (affinity of this process)", cores())});
  const auto sockets = std::set<std::string>(packages.begin(), packages.end()).size();
  chapter.facts.push_back(sockets == 0 ? unknown_fact("sockets") : fact("sockets", std::to_string(sockets)));
  chapter.facts.push_back(nodes == 0 ? unknown_fact("numa_nodes") : fact("numa_nodes", std::to_string(nodes)));
  return chapter;
}

Chapter memory_of_host() {
  Chapter chapter{"memory", {}};
  chapter.facts.push_back(bytes_or_unknown("total", meminfo("MemTotal")));
  chapter.facts.push_back(bytes_or_unknown("available", meminfo("MemAvailable")));
  chapter.facts.push_back(bytes_or_unknown("swap", meminfo("SwapTotal")));
  struct statvfs shm = {};
  const bool is_there = ::statvfs("/dev/shm", &shm) == 0;
  chapter.facts.push_back(is_there ? bytes_fact("/dev/shm", uint64_t{shm.f_blocks} * shm.f_frsize) : unknown_fact("/dev/shm", "not there"));
  const auto thp = text_of_file("/sys/kernel/mm/transparent_hugepage/enabled");
  chapter.facts.push_back(thp ? fact("transparent_huge_pages", *thp) : unknown_fact("transparent_huge_pages"));
  const auto pages = meminfo("HugePages_Total", 1), size = meminfo("Hugepagesize");
  if (pages && size) {
    chapter.facts.push_back({"huge_pages", *pages, fmt::format("{} of {}", *pages, train::short_bytes(static_cast<double>(*size)))});
  } else {
    chapter.facts.push_back(unknown_fact("huge_pages"));
  }
  return chapter;
}

/// The folders of this process's control group and of those around it, for a controller of version 1, or of version 2.
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

/// The least limit of memory that any group around this process has.
std::optional<uint64_t> memory_limit() {
  constexpr uint64_t kNone = uint64_t{1} << 60;  // version 1 has a number for no limit
  std::optional<uint64_t> least;
  for (const auto& group : control_groups("memory")) {
    for (const auto* name : {"memory.max", "memory.limit_in_bytes"}) {
      const auto limit = number_in(text_of_file(group / name).value_or("max"));
      if (limit && *limit < kNone) least = std::min(*limit, least.value_or(*limit));
    }
  }
  return least;
}

/// How many processors' worth of time this process may use.
std::optional<double> processor_limit() {
  std::optional<double> least;
  const auto take = [&](const std::string& quota, const std::string& period) {
    const auto part = number_in(quota), whole = number_in(period);
    if (!part || !whole || *whole == 0) return;
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
  if (::getrlimit(resource, &limit) != 0) return unknown_fact(name);
  if (limit.rlim_cur == RLIM_INFINITY) return unknown_fact(name, "none");
  if (resource == RLIMIT_MEMLOCK) return bytes_fact(name, limit.rlim_cur);
  return {name, limit.rlim_cur, std::to_string(limit.rlim_cur)};
}

Chapter limits() {
  Chapter chapter{"limits", {}};
  const auto memory = memory_limit();
  chapter.facts.push_back(memory ? bytes_fact("memory_of_control_group", *memory) : unknown_fact("memory_of_control_group", "none"));
  const auto share = processor_limit();
  chapter.facts.push_back(share ? Fact{"processors_of_control_group", *share, fmt::format("{:.3g}", *share)}
                                : unknown_fact("processors_of_control_group", "none"));
  chapter.facts.push_back(resource_limit("open_files", RLIMIT_NOFILE));
  chapter.facts.push_back(resource_limit("locked_memory", RLIMIT_MEMLOCK));
  return chapter;
}

Chapter system_of_machine() {
  utsname kernel = {};
  ::uname(&kernel);
  const auto names = values_in("/etc/os-release", "PRETTY_NAME");
  return {"system",
          {names.empty() ? unknown_fact("name") : fact("name", names.front()),
           fact("kernel", fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine)),
           fact("libc", fmt::format("glibc {}", ::gnu_get_libc_version()))}};
}

}  // namespace

Fact fact(std::string name, const std::string& value) {
  if (is_utf8(value)) return {std::move(name), value, printable(value)};
  std::string shown;
  for (const char c : printable(value)) shown += (c & 0x80) != 0 ? fmt::format("\\x{:02x}", c & 0xff) : std::string(1, c);
  return {std::move(name), shown, shown};  // JSON takes no other text
}

Fact bytes_fact(std::string name, uint64_t bytes) {
  return {std::move(name), bytes, train::short_bytes(static_cast<double>(bytes))};
}

Fact unknown_fact(std::string name, const std::string& why) {
  return {std::move(name), nullptr, why};
}

std::vector<Chapter> facts_of_machine() {
  return {processors(), memory_of_host(), limits(), system_of_machine()};
}

}  // namespace tessera::cli
