#include "tessera/simulate/outcome.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "tessera/base/format.h"
#include "tessera/base/table.h"

namespace tessera::simulate {
namespace {

using OutcomeJson = nlohmann::ordered_json;

std::string bytes_text(uint64_t bytes) {
  constexpr std::array kUnits = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); unit++) value /= 1000;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.3g} {}", value, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} s", seconds);
}

std::string kinds_text(const MemoryUse& use) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < kMemoryKinds; i++) {
    if (use.kinds[i] > 0) parts.push_back(fmt::format("{} {}", name(static_cast<MemoryKind>(i)), bytes_text(use.kinds[i])));
  }
  return joined(parts, ", ");
}

/// A table without its middle, if it is long.
template <size_t N>
std::string long_table(const std::vector<std::array<std::string, N>>& rows, std::string_view sides) {
  constexpr size_t kBegin = 21, kEnd = 10;
  const auto text = table_of(rows, sides);
  if (rows.size() <= kBegin + kEnd + 1) return text;
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1)
    lines.push_back(text.substr(begin, text.find('\n', begin) + 1 - begin));
  std::string shortened;
  for (size_t i = 0; i < lines.size(); i++) {
    if (i == kBegin) shortened += fmt::format("... {} more\n", lines.size() - kBegin - kEnd);
    if (i < kBegin || i + kEnd >= lines.size()) shortened += lines[i];
  }
  return shortened;
}

}  // namespace

std::string Outcome::to_text() const {
  std::string text = fmt::format("dry run of rank 0 of {} ({} a host), on the machine {}\n", ranks, ranks_per_host, machine);
  if (!units.empty()) {
    std::vector<std::array<std::string, 5>> rows = {{"unit", "parameters", "unsharded", "shard", "residence"}};
    for (const auto& unit : units)
      rows.push_back(
          {unit.name, std::to_string(unit.parameters), bytes_text(unit.unsharded), bytes_text(unit.shard), unit.residence});
    text += "\n" + long_table(rows, "<>>><");
  }
  if (schedule.empty()) return text + "\nthe program ended before its first backward pass, so no schedule and no memory is known\n";
  std::vector<std::array<std::string, 7>> rows = {{"at", "pass", "unit", "computes", "waits", "sends", "memory"}};
  for (const auto& use : schedule)
    rows.push_back({seconds_text(use.begin), use.phase, use.unit, seconds_text(use.computes), seconds_text(use.waits), bytes_text(use.sends),
                    bytes_text(use.memory)});
  text += fmt::format("\nstep {}\n", steps) + long_table(rows, "><<>>>>");
  text += fmt::format("\nmemory   {} at the most, in {}: {}\n", bytes_text(peak.all()), place, kinds_text(peak));
  text += fmt::format("sends    {} to gather and {} to reduce, {} of it to other hosts\n", bytes_text(gathered), bytes_text(reduced),
                      bytes_text(across));
  text += fmt::format("takes    {}: computes {} ({:.3g} TFLOP), waits {} for communication of {}, optimizer {}\n", seconds_text(step),
                      seconds_text(compute), flops / 1e12, seconds_text(exposed), seconds_text(communication), seconds_text(optimizer));
  for (const auto& [name, times] : computed) text += fmt::format("computed {} {} times, because its shape depends on values\n", name, times);
  return text;
}

std::string Outcome::to_json() const {
  OutcomeJson json = {{"world", ranks}, {"ranks_per_host", ranks_per_host}, {"machine", machine}, {"steps", steps}};
  uint64_t parameters = 0;
  json["units"] = OutcomeJson::array();
  for (const auto& unit : units) {
    parameters += unit.parameters;
    json["units"].push_back({{"name", unit.name},
                             {"parameters", unit.parameters},
                             {"unsharded", unit.unsharded},
                             {"shard", unit.shard},
                             {"residence", unit.residence}});
  }
  json["parameters"] = parameters;
  json["schedule"] = OutcomeJson::array();
  for (const auto& use : schedule) {
    json["schedule"].push_back({{"pass", use.phase},
                                {"unit", use.unit},
                                {"begin", use.begin},
                                {"computes", use.computes},
                                {"waits", use.waits},
                                {"sends", use.sends},
                                {"memory", use.memory}});
  }
  OutcomeJson kinds;
  for (size_t i = 0; i < kMemoryKinds; i++) kinds[std::string(name(static_cast<MemoryKind>(i)))] = peak.kinds[i];
  json["memory"] = {{"peak", peak.all()}, {"where", place}, {"kinds", kinds}};
  json["traffic"] = {{"gathered", gathered}, {"reduced", reduced}, {"across", across}};
  json["time"] = {
      {"step", step}, {"compute", compute}, {"communication", communication}, {"exposed", exposed}, {"optimizer", optimizer}};
  json["flops"] = flops;
  json["ran"] = computed;
  return json.dump(2) + "\n";
}

}  // namespace tessera::simulate
