#include "tessera/shard/report.h"

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <ranges>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/shard/advice.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

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

UnitFacts unit_facts(const InTree& in_tree, double steps) {
  auto& unit = *in_tree.unit;
  const bool is_whole = unit.mesh().shard().size() == 1;  // on every rank, so that nothing is unsharded
  UnitFacts facts{.name = unit.name(), .bytes = is_whole ? 0 : bytes_below(unit, ""), .is_frozen = true, .depth = in_tree.depth};
  facts.is_node_shared = is_whole || unit.memory().residence == "node-shared";
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) facts.is_tied |= !parameter.other_names.empty();
    for (const auto& parameter : group.listed()) facts.is_frozen &= !parameter.shard.requires_grad();
  }
  const LockedState state(unit);
  facts.keeps = state->settings.reshard_after_forward.keeps(/*is_root=*/false);
  if (steps > 0) {
    facts.gathers = static_cast<double>(unit.counters().gathers) / steps;
    facts.received = static_cast<double>(unit.counters().gathered_bytes) / steps;
  }
  return facts;
}

/// Lists the modules below `module`, whose unit this is, down to modules that have units of their own. `path`: of the module in the model,
/// `local`: below the unit's module.
void add_parts(UnitFacts& facts, const Unit& unit, const torch::nn::Module& module, const std::string& path, const std::string& local,
               size_t depth) {
  for (const auto& child : module.named_children()) {
    if (boundary_of(*child.value()).is_sharded) continue;
    PartFacts part{.path = path_below(path, child.key()), .class_name = class_name(*child.value()), .depth = depth};
    const auto inside = path_below(local, child.key());
    part.bytes = bytes_below(unit, inside + ".");
    const auto& name = part.class_name;
    const bool is_container = name == "ModuleList" || name == "ModuleDict" || name == "Sequential";
    if (part.bytes == 0) continue;
    if (!is_container) facts.parts.push_back(part);
    add_parts(facts, unit, *child.value(), part.path, inside, depth + (is_container ? 0 : 1));
  }
}

ModelFacts model_facts(ConstModuleRef model, const std::vector<InTree>& tree) {
  static const std::string kSeveral = "?";
  ModelFacts facts;
  for (const auto& [unit, depth] : tree) {
    const auto lock = unit->schedule()->lock();
    facts.steps = std::max(facts.steps, static_cast<double>(unit->counters().reductions));
    facts.ranks = std::max(facts.ranks, unit->mesh().shard().size());
  }
  for (const auto& in_tree : tree) facts.units.push_back(unit_facts(in_tree, facts.steps));
  const auto add_classes = [&](const torch::nn::Module& module, const std::string& path) {
    for (const auto& unit : units_of(module)) {
      const auto at = static_cast<size_t>(std::ranges::find(tree, unit, &InTree::unit) - tree.begin());
      if (at == tree.size()) continue;
      auto& own = facts.units[at];
      const auto name = class_name(module);
      const bool is_first = own.class_name.empty();
      own.class_name = is_first || own.class_name == name ? name : kSeveral;
      if (is_first && unit->name().find('+') == std::string::npos) add_parts(own, *unit, module, path, {}, 1);
    }
  };
  add_classes(*model, {});
  for (const auto& item : model->named_modules(/*name_prefix=*/{}, /*include_self=*/false)) add_classes(*item.value(), item.key());
  // Classes that several units have can't be named to divide one of them.
  std::map<std::string, std::set<std::string>> holders;
  for (const auto& unit : facts.units) {
    for (const auto& part : unit.parts) holders[part.class_name].insert(unit.name);
  }
  for (auto& unit : facts.units) {
    if (unit.class_name == kSeveral) unit.class_name.clear();
    for (auto& part : unit.parts) part.is_elsewhere = holders[part.class_name].size() > 1;
  }
  const auto total = counters(model);
  facts.misses = total.misses;
  facts.cancelled = total.cancelled;
  return facts;
}

/// The units that receive the most in a step.
std::string costs_of(const ModelFacts& model, uint64_t peak) {
  constexpr size_t kShown = 5;
  auto units = model.units;
  std::erase_if(units, [](const UnitFacts& unit) { return unit.received == 0; });
  if (units.empty()) return {};
  std::ranges::stable_sort(units, std::greater(), &UnitFacts::received);
  std::vector<std::array<std::string, 4>> rows = {{"a step", "of the peak", "unshards", "received"}};
  for (const auto& unit : units | std::views::take(kShown)) {
    const auto share = 100.0 * static_cast<double>(unit.bytes) / static_cast<double>(std::max(peak, uint64_t{1}));
    rows.push_back({shown_name(unit.name, 0), unit.is_node_shared ? "-" : fmt::format("{:.0f} %", share),
                    fmt::format("{:.1f}", unit.gathers), size_text(static_cast<uint64_t>(unit.received))});
  }
  const auto others = std::ssize(units) - std::ssize(rows) + 1;
  return table_of(rows, "<>>>") + (others > 0 ? fmt::format("... and {} more\n", others) : "");
}

std::string advice_lines(const std::vector<Advice>& advice) {
  constexpr size_t kMostColumns = 88;
  std::string text;
  for (const auto& item : advice) {
    std::string line = "advice:";
    for (const auto& word : words_in(item.text)) {
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
  std::vector<Row> rows = {{"unit", "parameters", "unsharded", "shard", "dtype", "residence", "unshards", "reduced"}};
  int64_t parameters = 0, buffers = 0;
  const auto tree = in_tree_order(units(module));
  for (const auto& [unit, depth] : tree) {
    rows.push_back(row_of(*unit, depth));
    parameters += numel_of(*unit);
  }
  if (rows.size() == 1) return "no module here is sharded; call tessera::fully_shard first\n";
  const auto total = counters(module);
  const auto facts = model_facts(module, tree);
  for (const auto& buffer : module->buffers()) buffers += buffer.numel();
  return table_of(rows, kAlignments) +
         fmt::format("{} in {}, {} in buffers; {} received\n", counted(parameters, "parameter"), counted(std::ssize(rows) - 1, "unit"),
                     counted(buffers, "value"), total.gathered_bytes == 0 ? "nothing" : size_text(total.gathered_bytes)) +
         fmt::format("peak of unsharded units {}, uses not foreseen {}, prefetches cancelled {}\n", size_text(total.peak_unsharded_bytes),
                     total.misses, total.cancelled) +
         costs_of(facts, total.peak_unsharded_bytes) + advice_lines(advice_for(facts));
}

}  // namespace tessera
