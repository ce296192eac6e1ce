#include "tessera/shard/advice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/words.h"

namespace tessera {
namespace {

constexpr double kStart = 50e-6;                // seconds that a collective takes whatever its size
constexpr double kSmallest = 4e9 * kStart;      // bytes; a transfer of fewer takes less time than its start
constexpr uint64_t kWorthDividing = 1'000'000;  // bytes; smaller units are never too large
constexpr double kWorthwhile = 0.8;             // of the peak: a change that leaves more is not proposed

/// Whether this is the unit of the model itself.
bool is_root_unit(const UnitFacts& unit, const std::vector<UnitFacts>& units) {
  return unit.depth == 0 && std::ranges::count(units, size_t{0}, &UnitFacts::depth) == 1;
}

double share_of(uint64_t part, uint64_t whole) { return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole); }

/// The lower median of the values.
template <class Value>
Value lower_median(std::vector<Value> values) {
  if (values.empty()) return {};
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// A unit whose parts have become units.
struct UnitDivision {
  std::vector<PartFacts> parts = {};
  uint64_t peak = 0;  // expected then
};

/// Makes units of the outermost parts that lower the peak enough. Small parts stay where they are.
UnitDivision divided_at(const std::vector<UnitFacts>& units, size_t at) {
  const auto& whole = units[at];
  std::set<size_t> depths;
  for (const auto& part : whole.parts) depths.insert(part.depth);
  for (const auto depth : depths) {
    auto divided = units;
    UnitDivision result;
    for (const auto& part : whole.parts) {
      if (part.depth != depth || static_cast<double>(part.bytes) < kSmallest || divided[at].bytes < part.bytes) continue;
      divided[at].bytes -= part.bytes;
      result.parts.push_back(part);
      divided.insert(divided.begin() + static_cast<std::ptrdiff_t>(at + result.parts.size()),
                     UnitFacts{.name = part.path, .bytes = part.bytes, .depth = whole.depth + 1});
    }
    result.peak = expected_peak(divided);
    if (static_cast<double>(result.peak) <= kWorthwhile * static_cast<double>(expected_peak(units))) return result;
  }
  return {};
}

/// Lines that make units of these modules in addition to those that exist.
std::string wrapping_of(const std::vector<UnitFacts>& units, const std::vector<PartFacts>& parts) {
  if (std::ranges::any_of(parts, &PartFacts::is_elsewhere)) return {};  // the policy would divide other units, too
  std::set<std::string> classes;
  for (const auto& unit : units) {
    if (!is_root_unit(unit, units) && !unit.class_name.empty()) classes.insert('"' + unit.class_name + '"');
  }
  for (const auto& part : parts) classes.insert('"' + part.class_name + '"');
  return fmt::format("tessera::fully_shard(model, options, tessera::wrap_classes({{{}}}));", fmt::join(classes, ", "));
}

void large_units(const ModelFacts& model, std::vector<Advice>& advice) {
  const auto& units = model.units;
  uint64_t total = 0;
  for (const auto& unit : units) {
    total += unit.bytes;
    if (unit.keeps) return;  // then all units are whole at once, however the model is divided
  }
  const auto peak = expected_peak(units);
  for (size_t i = 0; i < units.size(); i++) {
    const auto& unit = units[i];
    std::vector<uint64_t> others;
    for (size_t j = 0; j < units.size(); j++) {
      if (j != i) others.push_back(units[j].bytes);
    }
    const auto usual = lower_median(others);
    const bool is_odd = share_of(unit.bytes, peak) >= 40 && (unit.bytes >= 3 * usual || share_of(unit.bytes, total) >= 40);
    if (unit.bytes < kWorthDividing || !is_odd) continue;
    const auto division = divided_at(units, i);
    if (division.parts.empty() && !unit.class_name.empty()) continue;  // a large layer, which can't be divided
    std::set<std::string> classes;
    uint64_t largest = 0;
    for (const auto& part : division.parts) {
      classes.insert(part.class_name);
      largest = std::max(largest, part.bytes);
    }
    Advice item{.kind = units.size() == 1 ? "one unit" : "large unit", .unit = unit.name};
    item.text = units.size() == 1
                    ? fmt::format("The model is one unit, so that all {} of its parameters are whole at once.", size_text(unit.bytes))
                    : fmt::format("Unit '{}' has {}, {:.0f} % of the peak of unsharded units; half of the other units have at most {}.",
                                  unit.name, size_text(unit.bytes), share_of(unit.bytes, peak), size_text(usual));
    if (unit.is_node_shared) {
      item.text += " The ranks of this host share one copy, so this costs memory only over several hosts and on GPUs; but gradients are "
                   "not averaged before backward has computed all of the unit's.";
    }
    if (division.parts.empty()) {
      item.text += " Make units of the modules in it.";
    } else {
      item.text += fmt::format(" With {} of class {} as units, of at most {} each, the peak would be {} in place of {}.",
                               counted(std::ssize(division.parts), "module"), fmt::join(classes, ", "), size_text(largest),
                               size_text(division.peak), size_text(peak));
      item.change = wrapping_of(units, division.parts);
    }
    advice.push_back(std::move(item));
  }
}

void small_units(const ModelFacts& model, std::vector<Advice>& advice) {
  std::vector<std::string> names;
  std::set<std::string> classes;
  double bytes = 0, collectives = 0;
  for (const auto& unit : model.units) {
    if (unit.is_node_shared || static_cast<double>(unit.bytes) >= kSmallest || is_root_unit(unit, model.units)) continue;
    names.push_back(unit.name);
    classes.insert('"' + unit.class_name + '"');
    bytes += static_cast<double>(unit.bytes);
    collectives += (unit.gathers > 0 ? unit.gathers : 2) + (unit.is_frozen ? 0 : 1);
  }
  if (names.size() < 4 || 2 * names.size() < model.units.size()) return;
  const auto merged = 8 * kSmallest, left = std::ceil(bytes / merged), count = static_cast<double>(names.size());
  const auto saved = collectives * (1 - left / count);
  std::string change;
  if (!classes.contains("\"\"")) {
    change = fmt::format("auto policy = tessera::wrap_classes({{{}}});\npolicy.merge_below = {:.0f};  // values\n"
                         "tessera::fully_shard(model, options, policy);",
                         fmt::join(classes, ", "), merged / 4);
  }
  advice.push_back(
      {.kind = "small units",
       .text = fmt::format("{} of {} units are so small (less than {}) that the start of a transfer takes longer than their bytes: {}. "
                           "As {} they would save {:.0f} of {:.0f} collectives a step, about {:.1f} ms.",
                           names.size(), model.units.size(), size_text(static_cast<uint64_t>(kSmallest)), some_of(names),
                           counted(static_cast<int64_t>(left), "unit"), saved, collectives, saved * kStart * 1e3),
       .change = change});
}

void frozen_units(const ModelFacts& model, std::vector<Advice>& advice) {
  std::vector<std::string> names;
  uint64_t bytes = 0;
  double received = 0;
  for (const auto& unit : model.units) {
    if (!unit.is_frozen || unit.is_node_shared || unit.received == 0) continue;
    names.push_back(unit.name);
    bytes += unit.bytes;
    received += unit.received;
  }
  if (names.empty() || names.size() == model.units.size()) return;
  const auto more = bytes - bytes / static_cast<uint64_t>(model.ranks);
  Advice item{.kind = "frozen units"};
  item.text = fmt::format("Frozen units never change, but are gathered in each step, {}: {}. Whole on every rank they would take {} "
                          "more, and nothing would be received.",
                          size_text(static_cast<uint64_t>(received)), some_of(names), size_text(more));
  if (names.size() == 1) {
    item.unit = names.front();
    item.change = fmt::format("options.replicated = tessera::parameters_of_modules(*model, \"{}\");", item.unit);
  }
  advice.push_back(std::move(item));
}

void advice_on_uses(const ModelFacts& model, std::vector<Advice>& advice) {
  std::vector<double> gathers;
  double of_all = 0;
  bool is_gathered = false;
  for (const auto& unit : model.units) {
    if (!is_root_unit(unit, model.units)) gathers.push_back(unit.gathers);
    of_all += unit.gathers;
    is_gathered |= !unit.is_node_shared;
  }
  const auto usual = lower_median(gathers);
  for (const auto& unit : model.units) {
    if (unit.is_node_shared || gathers.size() < 3 || unit.gathers < usual + 0.9 || unit.gathers < 1.4 * usual) continue;
    const auto saved = unit.received * (1 - 1 / unit.gathers);
    advice.push_back(
        {.kind = "unit used often",
         .unit = unit.name,
         .text = fmt::format("Unit '{}' is gathered {:.1f} times a step, other units {:.1f} times, because {} used in places that lie "
                             "apart. Without a unit of its own it would be in the root's unit, which stays unsharded: {} of memory more, "
                             "and {} less received in a step.",
                             unit.name, unit.gathers, usual, unit.is_tied ? "its tied parameters are" : "it is", size_text(unit.bytes),
                             size_text(static_cast<uint64_t>(saved)))});
  }
  if (!is_gathered || model.steps < 3) return;
  const auto misses = static_cast<double>(model.misses), cancelled = static_cast<double>(model.cancelled);
  if (misses >= model.steps / 2) {
    advice.push_back({.kind = "order changes",
                      .text = fmt::format("{} uses of units in {:.0f} steps were not foreseen, because the order of modules differs from "
                                          "step to step. Each waits for its all-gather. Modules that data chooses, such as experts, belong "
                                          "in one unit.",
                                          model.misses, model.steps)});
  }
  if (cancelled >= 3 && cancelled >= 0.1 * of_all * model.steps) {
    const bool changes = misses >= model.steps / 2;
    advice.push_back({.kind = "prefetches lost",
                      .text = fmt::format("{} prefetched units were resharded before they were used, and gathered again: {:.0f} % of all "
                                          "gathers.",
                                          model.cancelled, 100 * cancelled / (of_all * model.steps)),
                      .change = changes ? "options.schedule.forward_prefetch = false;" : "options.schedule.max_live_units = 3;"});
  }
}

}  // namespace

uint64_t expected_peak(const std::vector<UnitFacts>& units) {
  uint64_t root = 0, most = 0, before = 0;
  for (const auto& unit : units) {
    if (is_root_unit(unit, units)) {
      root = unit.bytes;
      continue;
    }
    most = std::max(most, before + unit.bytes);
    before = unit.bytes;
  }
  return root + most;
}

std::vector<Advice> advice_for(const ModelFacts& model) {
  std::vector<Advice> advice;
  if (model.ranks < 2 || model.units.empty()) return advice;
  large_units(model, advice);
  small_units(model, advice);
  frozen_units(model, advice);
  advice_on_uses(model, advice);
  return advice;
}

std::string size_text(uint64_t bytes) {
  if (bytes == 0) return "-";
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace tessera
