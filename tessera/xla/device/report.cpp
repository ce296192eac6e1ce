// Prints the counters of compilations, runs and split steps as text for people.
#include "tessera/xla/metrics.h"

#include <fmt/format.h>

#include <iterator>

#include "tessera/xla/device/values.h"

namespace tessera::xla {
namespace {

double megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

}  // namespace

std::string metrics_report() {
  const auto all = metrics();
  std::string text;
  const auto line = [&]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text), format, std::forward<Args>(args)...);
    text += '\n';
  };
  line("XLA devices: {} of {}", runner().replicas(), runner().platform());
  line("  programs    {} compiled, {} loaded from disk, in {:.2f} s", all.compiles, all.loaded_from_disk, all.seconds_compiling);
  line("  executions  {}, {} of them of a program that was in memory; {} operators traced", all.executions, all.cache_hits, all.operators);
  if (all.dropped) line("  dropped     {} compiled programs", all.dropped);
  line("  host        {:.1f} MB uploaded, {:.1f} MB downloaded", megabytes(all.bytes_uploaded), megabytes(all.bytes_downloaded));
  if (all.peak_memory) line("  memory      {:.1f} MB at most in use on one device", megabytes(*all.peak_memory));
  for (const auto& [name, calls] : all.fallbacks) line("  on the CPU  {}, {} times", name, calls);
  for (const auto& [reader, times] : all.host_reads) line("  cut by      {}, {} times", reader, times);
  for (size_t i = 0; i < all.programs.size(); i++) {
    const auto& [operations, seconds, from_disk, executions, has_backward, memory, collectives] = all.programs[i];
    line("  program {:<4}{} operations, {} in {:.2f} s, {} executions; MB: {:.1f} arguments, {:.1f} results, {:.1f} of them in place, {:.1f} temporary",
         i + 1, operations, from_disk ? "loaded" : "compiled", seconds, executions, megabytes(memory.arguments), megabytes(memory.outputs),
         megabytes(memory.aliased), megabytes(memory.temporary));
    for (const auto& [name, its] : collectives) line("              {} {}, {:.1f} MB", its.count, name, megabytes(its.bytes));
  }
  return text;
}

}  // namespace tessera::xla
