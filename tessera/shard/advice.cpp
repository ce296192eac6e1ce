#include "tessera/shard/advice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/words.h"

namespace tessera {
namespace {

constexpr double kSecondsToStart = 50e-6;       // seconds that a collective takes whatever its size
constexpr uint64_t kBytesWorthStart = 200'000;  // bytes; a transfer of fewer takes less time than its start
constexpr uint64_t kWorthDividing = 1'000'000;  // bytes; smaller units are never too large

double ratio_of(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

class UnitAdviser {
 public:
  explicit UnitAdviser(const ModelFacts& model) : model_(model), units_(model.units), peak_(expected_peak(units_)) {}

  std::vector<Advice> advice() {
    if (model_.ranks < 2 || units_.empty()) return {};
    for (const auto& unit : units_) total_ += unit.bytes;
    // With reshard_after_forward = false, all units are whole at once, however the model is divided.
    if (std::ranges::none_of(units_, &UnitFacts::keeps)) {
      for (size_t i = 0; i < units_.size(); i++) look_for_parts_of(i);
    }
    small_units();
    frozen_units();
    repeated_gathers();
    return std::move(found_);
  }

 private:
  /// Whether this is the unit of the model itself.
  bool is_root(const UnitFacts& unit) const { return unit.depth == 0 && std::ranges::count(units_, size_t{0}, &UnitFacts::depth) == 1; }

  void look_for_parts_of(size_t at) {
    const auto& unit = units_[at];
    std::vector<double> others;
    for (const auto& other : units_) {
      if (&other != &unit) others.push_back(static_cast<double>(other.bytes));
    }
    const auto usual = lower_median(others);
    const bool is_larger = static_cast<double>(unit.bytes) >= 3 * usual || ratio_of(unit.bytes, total_) >= 0.4;
    if (unit.bytes < kWorthDividing || ratio_of(unit.bytes, peak_) < 0.4 || !is_larger) return;
    uint64_t peak = 0;
    const auto parts = parts_that_lower_the_peak(at, peak);
    if (parts.empty() && !unit.class_name.empty()) return;  // a large layer, which can't be divided
    auto text =
        units_.size() == 1
            ? fmt::format("The model is one unit, so that all {} of its parameters are whole at once.", size_text(unit.bytes))
            : fmt::format("Unit '{}' has {}, {:.0f} % of the peak of unsharded units; half of the others have at most {}.", unit.name,
                          size_text(unit.bytes), 100 * ratio_of(unit.bytes, peak_), size_text(static_cast<uint64_t>(usual)));
    if (unit.is_node_shared) {
      text +=
          " The ranks of this host share one copy, so this costs memory only over several hosts and on GPUs; but gradients are not "
          "averaged before backward has computed all of the unit's.";
    }
    std::set<std::string> classes;
    for (const auto& part : parts) classes.insert(part.class_name);
    text += parts.empty() ? " Make units of the modules in it."
                          : fmt::format(" With {} of class {} as units, of at most {} each, the peak would be {} in place of {}.",
                                        counted(std::ssize(parts), "module"), fmt::join(classes, ", "),
                                        size_text(std::ranges::max(parts, {}, &PartFacts::bytes).bytes), size_text(peak), size_text(peak_));
    // A policy of classes would divide other units, too, if they have such modules.
    const bool has_policy = !parts.empty() && std::ranges::none_of(parts, &PartFacts::is_elsewhere);
    for (const auto& other : units_) {
      if (!is_root(other) && !other.class_name.empty()) classes.insert(other.class_name);
    }
    found_.push_back(
        {units_.size() == 1 ? "one unit" : "large unit", unit.name, text,
         has_policy ? fmt::format("tessera::fully_shard(model, options, tessera::wrap_classes({{\"{}\"}}));", fmt::join(classes, "\", \""))
                    : ""});
  }

  /// The outermost parts that lower the peak by a fifth as units, and the peak then. Small parts stay where they are.
  std::vector<PartFacts> parts_that_lower_the_peak(size_t at, uint64_t& peak) const {
    std::set<size_t> depths;
    for (const auto& part : units_[at].parts) depths.insert(part.depth);
    for (const auto depth : depths) {
      auto divided = units_;
      std::vector<PartFacts> parts;
      for (const auto& part : units_[at].parts) {
        if (part.depth != depth || part.bytes < kBytesWorthStart || part.bytes > divided[at].bytes) continue;
        divided[at].bytes -= part.bytes;
        parts.push_back(part);
        divided.insert(divided.begin() + static_cast<std::ptrdiff_t>(at + parts.size()),
                       UnitFacts{.name = part.path, .bytes = part.bytes, .depth = units_[at].depth + 1});
      }
      peak = expected_peak(divided);
      if (ratio_of(peak, peak_) <= 0.8) return parts;
    }
    return {};
  }

  void small_units() {
    std::vector<std::string> names;
    std::set<std::string> classes;
    double bytes = 0, collectives = 0;
    for (const auto& unit : units_) {
      if (unit.is_node_shared || unit.bytes >= kBytesWorthStart || is_root(unit)) continue;
      names.push_back(unit.name);
      classes.insert(unit.class_name);
      bytes += static_cast<double>(unit.bytes);
      collectives += (unit.gathers > 0 ? unit.gathers : 2) + (unit.is_frozen ? 0 : 1);
    }
    if (names.size() < 4 || 2 * names.size() < units_.size()) return;
    const auto left = std::ceil(bytes / (8 * kBytesWorthStart)), saved = collectives * (1 - left / static_cast<double>(names.size()));
    found_.push_back(
        {"small units", "",
         fmt::format("{} of {} units have less than {}, so that the start of a transfer takes longer than its bytes: {}. As {} "
                     "they would save {:.0f} of {:.0f} collectives a step, about {:.1f} ms.",
                     names.size(), units_.size(), size_text(kBytesWorthStart), some_of(names), counted(static_cast<int64_t>(left), "unit"),
                     saved, collectives, saved * kSecondsToStart * 1e3),
         classes.contains("") ? ""
                              : fmt::format("auto policy = tessera::wrap_classes({{\"{}\"}});\npolicy.merge_below = {};  // values\n"
                                            "tessera::fully_shard(model, options, policy);",
                                            fmt::join(classes, "\", \""), 2 * kBytesWorthStart)});
  }

  void frozen_units() {
    std::vector<std::string> names;
    uint64_t bytes = 0;
    double received = 0;
    for (const auto& unit : units_) {
      if (!unit.is_frozen || unit.received == 0) continue;
      names.push_back(unit.name);
      bytes += unit.bytes;
      received += unit.received;
    }
    if (names.empty() || names.size() == units_.size()) return;
    const bool is_one = names.size() == 1;
    found_.push_back(
        {"frozen units", is_one ? names.front() : "",
         fmt::format("Frozen units never change, but are gathered in each step, {}: {}. Whole on every rank they would take {} "
                     "more, and nothing would be received.",
                     size_text(static_cast<uint64_t>(received)), some_of(names),
                     size_text(bytes - bytes / static_cast<uint64_t>(model_.ranks))),
         is_one ? fmt::format("options.replicated = tessera::parameters_of_modules(*model, \"{}\");", names.front()) : ""});
  }

  void repeated_gathers() {
    std::vector<double> each;
    double all = 0;
    for (const auto& unit : units_) {
      if (!is_root(unit)) each.push_back(unit.gathers);
      all += unit.is_node_shared ? 0 : unit.gathers * model_.steps;
    }
    const auto usual = lower_median(each);
    for (const auto& unit : units_) {
      if (unit.is_node_shared || each.size() < 3 || unit.gathers < usual + 0.9 || unit.gathers < 1.4 * usual) continue;
      found_.push_back(
          {"unit used often", unit.name,
           fmt::format("Unit '{}' is gathered {:.1f} times a step, other units {:.1f} times, because {} used in places that lie "
                       "apart. In the unit of the model itself, which stays unsharded, it would take {} of memory and save "
                       "{} a step.",
                       unit.name, unit.gathers, usual, unit.is_tied ? "its tied parameters are" : "it is", size_text(unit.bytes),
                       size_text(static_cast<uint64_t>(unit.received * (1 - 1 / unit.gathers)))),
           ""});
    }
    if (all == 0 || model_.steps < 3) return;
    const bool changes = static_cast<double>(model_.misses) >= model_.steps / 2;
    const auto cancelled = static_cast<double>(model_.cancelled);
    if (changes) {
      found_.push_back({"order changes", "",
                        fmt::format("{} uses of units in {:.0f} steps were not foreseen, because the order of modules differs from step to "
                                    "step. Each waits for its all-gather. Modules that data chooses, such as experts, belong in one unit.",
                                    model_.misses, model_.steps),
                        ""});
    }
    if (cancelled >= 3 && cancelled >= 0.1 * all) {
      found_.push_back(
          {"prefetches lost", "",
           fmt::format("{} prefetched units were resharded before they were used, and gathered again: {:.0f} % of all gathers.",
                       model_.cancelled, 100 * cancelled / all),
           changes ? "options.schedule.forward_prefetch = false;" : "options.schedule.max_live_units = 3;"});
    }
  }

  const ModelFacts& model_;
  const std::vector<UnitFacts>& units_;
  const uint64_t peak_;
  uint64_t total_ = 0;
  std::vector<Advice> found_;
};

}  // namespace

uint64_t expected_peak(const std::vector<UnitFacts>& units) {
  const bool has_root = std::ranges::count(units, size_t{0}, &UnitFacts::depth) == 1;
  uint64_t root = 0, most = 0, before = 0;
  for (const auto& unit : units) {
    if (has_root && unit.depth == 0) {
      root = unit.bytes;
    } else {
      most = std::max(most, before + unit.bytes);
      before = unit.bytes;
    }
  }
  return root + most;
}

std::vector<Advice> advice_for(const ModelFacts& model) {
  return UnitAdviser(model).advice();
}

std::string size_text(uint64_t bytes) {
  if (bytes == 0) return "-";
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace tessera
