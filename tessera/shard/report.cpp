#include "tessera/shard/report.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/shard/advice.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/figures.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

std::string bytes_text(uint64_t bytes) {
  return bytes == 0 ? "-" : size_text(static_cast<double>(bytes));
}

/// A row of the table of units.
constexpr size_t kColumns = 8;
using Row = std::array<std::string, kColumns>;
constexpr std::string_view kAlignments = "<>>><<>>";  // words begin at the left of their columns, numbers end at the right

/// The name, indented and shortened in its middle, so that the columns of numbers stay on the screen.
std::string shown_name(const std::string& name, int64_t depth) {
  constexpr size_t kMost = 40, kEnd = 18;
  const auto shown = name.size() <= kMost ? name : name.substr(0, kMost - kEnd - 3) + "..." + name.substr(name.size() - kEnd);
  return std::string(static_cast<size_t>(2 * depth), ' ') + shown;
}

struct InTree {
  std::shared_ptr<Unit> unit;
  UnitFigures figures;
};

Row row_of(const InTree& in_tree) {
  const auto& [unit, figures] = in_tree;
  const auto lock = unit->schedule()->lock();
  const auto& counters = unit->counters();
  return {shown_name(figures.name, figures.depth),
          fmt::format("{}", figures.parameters),
          bytes_text(figures.unsharded),
          bytes_text(figures.shard),
          figures.dtype,
          figures.residence + (unit->memory().disk ? ", disk" : ""),
          fmt::format("{}", counters.gathers),
          bytes_text(counters.gathered_bytes)};
}

/// Whether the unit was made from the model itself. Such a unit is named after the model's class; any other is named after its path in the
/// model, and the names of its parameters begin with that path.
bool is_of_model(Unit& unit) {
  if (unit.name().ends_with(kReplicated)) return false;
  const auto place = unit.name().substr(0, unit.name().find('+'));  // the first path of a unit of several modules
  return !unit.groups().front().parameters.front().name.starts_with(place + ".");
}

/// Returns the units in an order in which each comes after the units whose modules contain its module.
std::vector<InTree> in_tree_order(const std::vector<std::shared_ptr<Unit>>& all) {
  const auto contains = [](const std::shared_ptr<Unit>& outer, const std::shared_ptr<Unit>& inner) {
    if (outer == inner || outer->schedule() != inner->schedule()) return false;
    return is_of_model(*outer) ? !is_of_model(*inner) : inner->name().starts_with(outer->name() + ".");
  };
  std::vector<InTree> result;
  for (const auto& unit : all) {
    const LockedState state(*unit);
    auto figures = figures_of(*unit);
    figures.depth = std::ranges::count_if(all, [&](const auto& other) { return contains(other, unit); });
    figures.keeps = state->settings.reshard_after_forward.keeps(/*is_root=*/false);
    // An outer unit may be listed after its inner units, because its own parameters may be. It is inserted before the first unit that it
    // contains.
    const auto at = std::ranges::find_if(result, [&](const InTree& known) { return contains(unit, known.unit); });
    result.insert(at, {.unit = unit, .figures = std::move(figures)});
  }
  return result;
}

/// Bytes of the whole parameters whose names in the unit's module begin with this.
uint64_t bytes_below(const Unit& unit, const std::string& prefix) {
  uint64_t bytes = 0;
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) {
      if (!parameter.local_name.starts_with(prefix)) continue;
      bytes += static_cast<uint64_t>(parameter.span.numel) * c10::elementSize(group.unsharded_dtype);
    }
  }
  return bytes;
}

/// Lists the modules below `module`, whose unit this is, down to modules that have units of their own. `path` is below the unit's module.
void add_parts(UnitFigures& figures, const Unit& unit, const torch::nn::Module& module, const std::string& path, int64_t depth) {
  for (const auto& child : module.named_children()) {
    const auto inside = path_below(path, child.key());
    const UnitPart part{.class_name = class_name(*child.value()), .bytes = bytes_below(unit, inside + "."), .depth = depth};
    if (part.bytes == 0 || boundary_of(*child.value()).is_sharded) continue;
    const bool is_container = part.class_name == "ModuleList" || part.class_name == "ModuleDict" || part.class_name == "Sequential";
    if (!is_container) figures.parts.push_back(part);
    add_parts(figures, unit, *child.value(), inside, depth + (is_container ? 0 : 1));
  }
}

std::vector<UnitFigures> figures_for_advice(ConstModuleRef model, const std::vector<InTree>& tree) {
  std::vector<UnitFigures> all;
  for (const auto& [unit, figures] : tree) {
    const bool is_gathered = unit->mesh().shard().size() > 1 && figures.residence != "node-shared";
    all.push_back(figures);
    all.back().unsharded = is_gathered ? bytes_below(*unit, "") : 0;
  }
  const auto add_class = [&](const torch::nn::Module& module) {
    for (const auto& unit : units_of(module)) {
      const auto at = std::ranges::find(tree, unit, &InTree::unit) - tree.begin();
      const bool is_of_several = unit->name().find('+') != std::string::npos;
      if (at == std::ssize(tree) || is_of_several || !all[at].class_name.empty()) continue;
      all[at].class_name = class_name(module);
      add_parts(all[at], *unit, module, {}, 1);
    }
  };
  add_class(*model);
  for (const auto& module : model->modules(/*include_self=*/false)) add_class(*module);
  return all;
}

std::string advice_lines(const std::vector<Advice>& advice) {
  constexpr size_t kMostColumns = 88;
  std::string text;
  for (const auto& item : advice) {
    std::string line = "advice:";
    for (const auto& word : words_in(item.title + ". " + item.evidence)) {
      if (line.size() + word.size() >= kMostColumns) text += std::exchange(line, " ") + '\n';
      line += ' ' + word;
    }
    text += line + '\n';
    std::istringstream lines(item.change);
    for (line.clear(); std::getline(lines, line);) text += "    " + line + '\n';
  }
  return text;
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
  std::vector<Row> rows = {{"unit", "parameters", "unsharded", "shard", "dtype", "residence", "unshards", "received"}};
  int64_t parameters = 0, buffers = 0;
  const auto tree = in_tree_order(units(module));
  for (const auto& in_tree : tree) {
    rows.push_back(row_of(in_tree));
    parameters += in_tree.figures.parameters;
  }
  if (rows.size() == 1) return "no module here is sharded; call tessera::fully_shard first\n";
  const auto total = counters(module);
  for (const auto& buffer : module->buffers()) buffers += buffer.numel();
  return table_of(rows, kAlignments) +
         fmt::format("{} in {}, {} in buffers; {} received\n", counted(parameters, "parameter"), counted(std::ssize(rows) - 1, "unit"),
                     counted(buffers, "value"), total.gathered_bytes == 0 ? "nothing" : bytes_text(total.gathered_bytes)) +
         fmt::format("peak of unsharded units {}, uses not foreseen {}, prefetches cancelled {}\n", bytes_text(total.peak_unsharded_bytes),
                     total.misses, total.cancelled) +
         advice_lines(advice_on_units(figures_for_advice(module, tree)));
}

}  // namespace tessera
