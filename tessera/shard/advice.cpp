#include "tessera/shard/advice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/words.h"

namespace tessera {
namespace {

constexpr uint64_t kBytesWorthStart = 200'000;  // a transfer of fewer takes less time than its start
constexpr uint64_t kWorthDividing = 1'000'000;  // smaller units are never too large
constexpr double kLargeWait = 0.08, kSmallWaits = 0.05, kPartOfProcess = 0.25;  // in measured runs

double ratio_of(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

/// Whether this is the unit of the model itself, which stays unsharded.
bool is_of_whole_model(const UnitFigures& unit, const std::vector<UnitFigures>& units) {
  return unit.depth == 0 && std::ranges::count(units, int64_t{0}, &UnitFigures::depth) == 1;
}

/// The most bytes of unsharded units in a step: of a unit, of the next one, and of the root.
uint64_t expected_peak(const std::vector<UnitFigures>& units) {
  uint64_t root = 0, most = 0, before = 0;
  for (const auto& unit : units) {
    if (is_of_whole_model(unit, units)) {
      root = unit.unsharded;
    } else {
      most = std::max(most, before + unit.unsharded);
      before = unit.unsharded;
    }
  }
  return root + most;
}

/// The outermost parts that lower the peak by a fifth as units, and the peak then. Small parts stay where they are.
std::vector<UnitPart> parts_that_lower_the_peak(const std::vector<UnitFigures>& units, size_t at, uint64_t& peak) {
  std::set<int64_t> depths;
  for (const auto& part : units[at].parts) depths.insert(part.depth);
  for (const auto depth : depths) {
    auto divided = units;
    std::vector<UnitPart> parts;
    for (const auto& part : units[at].parts) {
      if (part.depth != depth || part.bytes < kBytesWorthStart || part.bytes > divided[at].unsharded) continue;
      divided[at].unsharded -= part.bytes;
      parts.push_back(part);
      divided.insert(divided.begin() + static_cast<std::ptrdiff_t>(at + parts.size()),
                     UnitFigures{.name = part.class_name, .unsharded = part.bytes, .depth = units[at].depth + 1});
    }
    peak = expected_peak(divided);
    if (ratio_of(peak, expected_peak(units)) <= 0.8) return parts;
  }
  return {};
}

void find_large_unit(const std::vector<UnitFigures>& units, size_t at, double process, std::vector<Advice>& found) {
  const auto& unit = units[at];
  const auto before = expected_peak(units);
  std::vector<uint64_t> others;
  uint64_t total = 0, peak = 0;
  for (const auto& other : units) {
    total += other.unsharded;
    if (&other != &unit) others.push_back(other.unsharded);
  }
  std::ranges::sort(others);
  const auto usual = others.empty() ? 0 : others[(others.size() - 1) / 2];
  if (unit.unsharded < kWorthDividing || ratio_of(unit.unsharded, before) < 0.4) return;
  if (unit.unsharded < 3 * usual && ratio_of(unit.unsharded, total) < 0.4) return;
  if (process > 0 && static_cast<double>(unit.unsharded) < kPartOfProcess * process && unit.waits < kLargeWait) return;
  const auto parts = parts_that_lower_the_peak(units, at, peak);
  if (parts.empty() && !unit.class_name.empty()) return;  // a large layer, which can't be divided
  auto evidence = fmt::format("{} of its parameters are whole at once, {:.0f} % of the peak of unsharded units.", size_text(unit.unsharded),
                              100 * ratio_of(unit.unsharded, before));
  if (unit.waits > 0) evidence += fmt::format(" Steps wait {:.0f} % of their time for it.", 100 * unit.waits);
  std::set<std::string> classes;
  for (const auto& part : parts) classes.insert(part.class_name);
  evidence += parts.empty() ? " Make units of the modules in it."
                            : fmt::format(" With {} of class {} as units, of at most {} each, the peak would be {} in place of {}.",
                                          counted(std::ssize(parts), "module"), fmt::join(classes, ", "),
                                          size_text(std::ranges::max(parts, {}, &UnitPart::bytes).bytes), size_text(peak),
                                          size_text(before));
  for (const auto& other : units) {
    if (!is_of_whole_model(other, units) && !other.class_name.empty()) classes.insert(other.class_name);
  }
  found.push_back({others.empty() ? "one-unit" : "unit-too-large",
                   others.empty() ? "The model is one unit" : fmt::format("Unit '{}' is too large", unit.name), evidence,
                   parts.empty() ? "for (auto& child : module->children()) tessera::fully_shard(child, options);  // before the module"
                                 : fmt::format("tessera::fully_shard(model, options, tessera::wrap_classes({{\"{}\"}}));",
                                               fmt::join(classes, "\", \"")),
                   {unit.name}});
}

void find_small_units(const std::vector<UnitFigures>& units, double process, std::vector<Advice>& found) {
  constexpr int kCollectives = 3;  // of a unit in a step: two gathers and a reduction
  std::vector<std::string> names;
  std::set<std::string> classes;
  double bytes = 0, waits = 0;
  for (const auto& unit : units) {
    if (unit.unsharded == 0 || unit.unsharded >= kBytesWorthStart || is_of_whole_model(unit, units)) continue;
    names.push_back(unit.name);
    classes.insert(unit.class_name);
    bytes += static_cast<double>(unit.unsharded);
    waits += unit.waits;
  }
  if (names.size() < 4 || 2 * names.size() < units.size() || (process > 0 && waits < kSmallWaits)) return;
  const auto left = static_cast<int64_t>(std::ceil(bytes / (8 * kBytesWorthStart)));
  auto evidence = fmt::format(
      "They have less than {}, so that a transfer is mostly its start: {}. As {} they would save {} collectives a step.",
      size_text(kBytesWorthStart), some_of(names), counted(left, "unit"), kCollectives * (std::ssize(names) - left));
  if (waits > 0) evidence += fmt::format(" Steps wait {:.0f} % of their time for them.", 100 * waits);
  const auto policy = fmt::format("auto policy = tessera::wrap_classes({{\"{}\"}});\n", fmt::join(classes, "\", \""));
  found.push_back({"units-too-small", fmt::format("{} of {} units are too small", names.size(), units.size()), evidence,
                   fmt::format("{}policy.merge_below = {};  // values\ntessera::fully_shard(model, options, policy);",
                               classes.contains("") ? "" : policy, 2 * kBytesWorthStart),
                   names});
}

}  // namespace

std::vector<Advice> advice_on_units(const std::vector<UnitFigures>& units, double process) {
  std::vector<Advice> found;
  // With reshard_after_forward = false, all units are whole at once, however the model is divided.
  for (size_t i = 0; i < units.size() && std::ranges::none_of(units, &UnitFigures::keeps); i++) find_large_unit(units, i, process, found);
  find_small_units(units, process, found);
  return found;
}

}  // namespace tessera
