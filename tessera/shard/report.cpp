#include "tessera/shard/report.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <set>

#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

std::string size_text(uint64_t bytes) {
  if (bytes == 0) return "-";
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

/// A row of the table of units.
constexpr size_t kColumns = 8;
using Row = std::array<std::string, kColumns>;
constexpr std::string_view kAlignments = "<>>><<>>";  // words begin at the left of their columns, numbers end at the right

/// The name, indented and shortened in its middle, so that the columns of numbers stay on the screen.
std::string shown_name(const std::string& name, size_t depth) {
  constexpr size_t kMost = 40, kEnd = 18;
  const auto shown = name.size() <= kMost ? name : name.substr(0, kMost - kEnd - 3) + "..." + name.substr(name.size() - kEnd);
  return std::string(2 * depth, ' ') + shown;
}

int64_t numel_of(const Unit& unit) {
  int64_t numel = 0;
  for (const auto& parameter : parameters_of(unit)) numel += parameter.span.numel;
  return numel;
}

Row row_of(Unit& unit, size_t depth) {
  const auto lock = unit.schedule()->lock();
  const auto& memory = unit.memory();
  std::set<std::string> dtypes;
  uint64_t shard_bytes = 0;
  for (const auto& group : unit.groups()) {
    shard_bytes += group.own.nbytes();
    dtypes.insert(c10::toString(group.unsharded_dtype));
  }
  const auto& counters = unit.counters();
  return {shown_name(unit.name(), depth),
          fmt::format("{}", numel_of(unit)),
          size_text(memory.unsharded_bytes(unit.buffers())),
          size_text(shard_bytes),
          fmt::format("{}", fmt::join(dtypes, "+")),
          fmt::format("{}{}", memory.residence, memory.disk ? ", disk" : ""),
          fmt::format("{}", counters.gathers),
          fmt::format("{}", counters.reductions)};
}

/// Whether the unit was made from the model itself. Such a unit is named after the model's class; any other is named after its path in the
/// model, and the names of its parameters begin with that path.
bool is_of_model(Unit& unit) {
  if (unit.name().ends_with(kReplicated)) return false;
  const auto place = unit.name().substr(0, unit.name().find('+'));  // the first path of a unit of several modules
  return !unit.groups().front().parameters.front().name.starts_with(place + ".");
}

struct InTree {
  std::shared_ptr<Unit> unit;
  size_t depth = 0;
};

/// Returns the units in an order in which each comes after the units whose modules contain its module.
std::vector<InTree> in_tree_order(const std::vector<std::shared_ptr<Unit>>& all) {
  const auto contains = [](const std::shared_ptr<Unit>& outer, const std::shared_ptr<Unit>& inner) {
    if (outer == inner || outer->schedule() != inner->schedule()) return false;
    return is_of_model(*outer) ? !is_of_model(*inner) : inner->name().starts_with(outer->name() + ".");
  };
  std::vector<InTree> result;
  for (const auto& unit : all) {
    const auto depth = std::ranges::count_if(all, [&](const auto& other) { return contains(other, unit); });
    // An outer unit may be listed after its inner units, because its own parameters may be. It is inserted before the first unit that it
    // contains.
    const auto at = std::ranges::find_if(result, [&](const InTree& known) { return contains(unit, known.unit); });
    result.insert(at, {.unit = unit, .depth = static_cast<size_t>(depth)});
  }
  return result;
}

}  // namespace

ModelCounters counters(ConstModuleRef module) {
  ModelCounters total;
  std::set<const Schedule*> seen;  // only one, unless fully_shard was called on parts of the module and not on the module itself
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    const auto& own = unit->counters();
    total.gathers += own.gathers;
    total.reductions += own.reductions;
    total.gathered_bytes += own.gathered_bytes;
    total.cancelled += own.cancelled;
    total.peak_unsharded_bytes = std::max(total.peak_unsharded_bytes, schedule->live_counters().peak_bytes);
    if (seen.insert(schedule.get()).second) total.misses += schedule->misses();
  }
  return total;
}

void reset_counters(ModuleRef module) {
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    unit->counters() = {};
    schedule->reset_counters();
  }
}

std::string describe(ConstModuleRef module) {
  std::vector<Row> rows = {{"unit", "parameters", "unsharded", "shard", "dtype", "residence", "unshards", "reduced"}};
  int64_t parameters = 0, buffers = 0;
  for (const auto& [unit, depth] : in_tree_order(units(module))) {
    rows.push_back(row_of(*unit, depth));
    parameters += numel_of(*unit);
  }
  if (rows.size() == 1) return "no module here is sharded; call tessera::fully_shard first\n";
  const auto total = counters(module);
  for (const auto& buffer : module->buffers()) buffers += buffer.numel();
  return table_of(rows, kAlignments) +
         fmt::format("{} in {}, {} in buffers; {} received\n", counted(parameters, "parameter"), counted(std::ssize(rows) - 1, "unit"),
                     counted(buffers, "value"), total.gathered_bytes == 0 ? "nothing" : size_text(total.gathered_bytes)) +
         fmt::format("peak of unsharded units {}, uses not foreseen {}, prefetches cancelled {}\n", size_text(total.peak_unsharded_bytes),
                     total.misses, total.cancelled);
}

}  // namespace tessera
