#include "tessera/simulate/outcome.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tessera/base/table.h"
#include "tessera/base/words.h"

namespace tessera::simulate {
namespace {

using OutcomeJson = nlohmann::ordered_json;

std::string size_of(uint64_t bytes) {
  return size_text(static_cast<double>(bytes));
}

/// A table without its middle, if it is long.
template <size_t N>
std::string short_table(std::vector<std::array<std::string, N>> rows, std::string_view sides) {
  constexpr size_t kBegin = 21, kEnd = 10;
  if (rows.size() > kBegin + kEnd + 1) {
    rows[kBegin] = {fmt::format("... {} more", rows.size() - kBegin - kEnd)};
    rows.erase(rows.begin() + kBegin + 1, rows.end() - kEnd);
  }
  return table_of(rows, sides);
}

}  // namespace

std::string Outcome::to_text() const {
  std::string text = fmt::format("dry run of rank 0 of {} ({} a host), on the machine {}\n", ranks, ranks_per_host, machine);
  std::vector<std::array<std::string, 5>> facts = {{"unit", "parameters", "unsharded", "shard", "residence"}};
  for (const auto& unit : units)
    facts.push_back({unit.name, std::to_string(unit.parameters), size_of(unit.unsharded), size_of(unit.shard), unit.residence});
  if (!units.empty()) text += "\n" + short_table(facts, "<>>><");
  if (last.schedule.empty()) return text + "\nthe program ended before its first backward pass, so no schedule and no memory is known\n";
  std::vector<std::array<std::string, 7>> uses = {{"pass", "unit", "at", "computes", "waits", "sends", "memory"}};
  for (const auto& use : last.schedule)
    uses.push_back({use.pass, use.unit, duration_text(use.begin), duration_text(use.computes), duration_text(use.waits),
                    size_of(use.sends), size_of(use.memory)});
  text += fmt::format("\nstep {}\n", steps) + short_table(uses, "<<>>>>>");
  text += fmt::format("\nmemory   {} at the most, in {}:", size_of(last.peak.all()), last.place);
  for (size_t i = 0; i < kMemoryKinds; i++)
    text += fmt::format("{} {} {}", i == 0 ? "" : ",", name(static_cast<MemoryKind>(i)), size_of(last.peak[i]));
  text += fmt::format("\nsends    {} to gather and {} to reduce, {} of it to other hosts\n", size_of(last.gathered), size_of(last.reduced),
                      size_of(last.across));
  text += fmt::format("takes    {}: computes {} ({:.3g} TFLOP), waits {} for communication of {}, optimizer {}\n", duration_text(last.step),
                      duration_text(last.compute), last.flops / 1e12, duration_text(last.exposed), duration_text(last.communication),
                      duration_text(last.optimizer));
  for (const auto& [name, times] : computed)
    text += fmt::format("computed {} {} times, because its shape depends on values\n", name, times);
  return text;
}

std::string Outcome::to_json() const {
  uint64_t parameters = 0;
  for (const auto& unit : units) parameters += static_cast<uint64_t>(unit.parameters);
  OutcomeJson kinds;
  for (size_t i = 0; i < kMemoryKinds; i++) kinds[std::string(name(static_cast<MemoryKind>(i)))] = last.peak[i];
  const OutcomeJson json = {{"world", ranks},
                            {"ranks_per_host", ranks_per_host},
                            {"machine", machine},
                            {"steps", steps},
                            {"units", nlohmann::json(units)},
                            {"parameters", parameters},
                            {"schedule", nlohmann::json(last.schedule)},
                            {"memory", {{"peak", last.peak.all()}, {"where", last.place}, {"kinds", kinds}}},
                            {"traffic", {{"gathered", last.gathered}, {"reduced", last.reduced}, {"across", last.across}}},
                            {"time",
                             {{"step", last.step},
                              {"compute", last.compute},
                              {"communication", last.communication},
                              {"exposed", last.exposed},
                              {"optimizer", last.optimizer}}},
                            {"flops", last.flops},
                            {"ran", computed}};
  return json.dump(2) + "\n";
}

}  // namespace tessera::simulate
