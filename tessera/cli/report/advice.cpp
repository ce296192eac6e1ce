// The causes for which `tessera report` looks, what it takes as evidence, and what it advises.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "tessera/base/words.h"
#include "tessera/cli/report/analysis.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli::reports {
namespace {

constexpr double kSmallUnit = 1 << 20, kSmallDifference = 64e6;

std::string short_seconds(double seconds) {
  return seconds < 0.9995 ? fmt::format("{:.3g} ms", seconds * 1e3) : fmt::format("{:.3g} s", seconds);
}

std::string percent(double part) {
  return fmt::format("{:.0f} %", part * 100);
}

/// Looks for one cause after the other.
class Adviser {
 public:
  Adviser(const RecordedRun& run, const Analysis& all) : run_(run), all_(all), step_(all.step_seconds) {
    for (int rank = 0; rank < run.world(); rank++) {
      const auto& total = all.totals[rank];
      if (total.steps == 0) continue;
      ranks_.push_back(rank);
      compute_.push_back(total.per_step(total.compute));
      waits_.push_back(total.per_step(total.unshard + total.reduce));
      other_.push_back(total.per_step(total.other));
      memory_.push_back(process_of(rank));
      steps_ += static_cast<double>(total.steps), gathers_ += total.gathers, misses_ += total.misses, cancelled_ += total.cancelled;
    }
    for (const auto& unit : run.units) {
      if (is_gathered(unit)) sizes_.push_back(unit.unsharded);
    }
  }

  std::vector<Advice> advice() {
    losses();
    if (ranks_.empty() || step_ <= 0) return std::move(found_);
    if (ranks_.size() > 1 && !slow_rank()) uneven_work();
    if (ranks_.size() > 1) uneven_memory(), large_units(), small_units(), late_prefetch(), communication(), gathers();
    program();
    return std::move(found_);
  }

 private:
  static bool is_gathered(const RecordedUnit& unit) { return unit.residence != "node-shared" && unit.unsharded > 0; }
  double process_of(int rank) const {
    const auto& memory = all_.totals[rank].memory;
    return memory.contains("process") ? memory.at("process") : 0;
  }
  void add(Advice advice) { found_.push_back(std::move(advice)); }

  void losses() {
    const auto loss = run_.metrics.find("loss");
    if (loss == run_.metrics.end()) return;
    const auto is_bad = [](const auto& point) { return std::isnan(point.second); };
    const auto first = std::ranges::find_if(loss->second, is_bad);
    if (first == loss->second.end()) return;
    add({"loss-not-finite", fmt::format("The loss is not finite from step {} on", first->first),
         fmt::format("{} of {} reported losses are NaN or infinite.", std::ranges::count_if(loss->second, is_bad), loss->second.size()),
         "Lower the learning rate, clip gradients (clip_grad_norm), or compute in bfloat16 in place of float16."});
  }

  /// Looks for ranks that compute clearly longer than the median while others wait.
  bool slow_rank() {
    const auto median = middle_value(compute_), longest_wait = std::ranges::max(waits_);
    std::vector<int> slow;
    for (size_t i = 0; i < ranks_.size(); i++) {
      if (compute_[i] > 1.15 * median && longest_wait - waits_[i] > 0.05 * step_) slow.push_back(ranks_[i]);
    }
    if (slow.empty()) return false;
    const auto& total = all_.totals[slow.front()];
    double lost = 0;  // by all others in a step
    for (const auto wait : waits_) lost += std::max(0.0, wait - total.per_step(total.unshard + total.reduce));
    add({"slow-rank", fmt::format("Slow: {} on {}, for which the others wait", name_ranks(slow), run_.ranks[slow.front()].host),
         fmt::format("It computes {} in a step, the median rank {}. The others together lose {} in each step, {} in {} steps.",
                     short_seconds(total.per_step(total.compute)), short_seconds(median), short_seconds(lost),
                     short_seconds(lost * static_cast<double>(total.steps)), total.steps),
         "Measure the machines: tessera test --speed. Look for other programs on that host, for fewer cores, and for more data on that "
         "rank.",
         slow});
    return true;
  }

  void uneven_work() {
    size_t lines = run_.ranks[ranks_.front()].lines.size();
    for (const int rank : ranks_) lines = std::min(lines, run_.ranks[rank].lines.size());
    double longer = 0;  // by which part of a step the longest computes longer than the median
    for (size_t i = 1; i < lines; i++) {
      std::vector<double> here;
      for (const int rank : ranks_) here.push_back(run_.ranks[rank].lines[i].per_step(run_.ranks[rank].lines[i].compute));
      longer += (std::ranges::max(here) - middle_value(here)) / step_ / static_cast<double>(lines - 1);
    }
    if (longer < 0.1 || middle_value(waits_) < 0.1 * step_) return;
    add({"uneven-work", "Ranks get unequal work, each time another one the most",
         fmt::format("The longest computes {} of a step longer than the median; ranks wait {} of the time.", percent(longer),
                     percent(middle_value(waits_) / step_)),
         "Pack rows to one length, or sort samples by length before they are divided among the ranks."});
  }

  void uneven_memory() {
    const auto most = std::ranges::max_element(memory_);
    const auto median = middle_value(memory_);
    if (*most < 1.25 * median || *most - median < kSmallDifference) return;
    const int rank = ranks_[most - memory_.begin()];
    add({"uneven-memory",
         fmt::format("Rank {} takes more memory than the others", rank),
         fmt::format("At most {}; the median rank {}.", train::short_bytes(*most), train::short_bytes(median)),
         "Look for what only this rank keeps: tensors gathered for a report or a save, data, or one large parameter with "
         "Layout::WholeParameters.",
         {rank}});
  }

  void large_units() {
    const auto sum = std::accumulate(sizes_.begin(), sizes_.end(), 0.0), process = process_of(all_.peak_rank);
    for (size_t i = 0; i < run_.units.size(); i++) {
      const auto& unit = run_.units[i];
      const auto wait = all_.units[i].transfer_wait / step_;
      if (!is_gathered(unit) || unit.unsharded < kSmallUnit || (sizes_.size() > 1 && unit.unsharded < 2.5 * middle_value(sizes_))) continue;
      if ((unit.unsharded < 0.5 * sum || unit.unsharded < 0.25 * process) && wait < 0.08) continue;
      add({"unit-too-large",
           fmt::format("Unit '{}' is too large", unit.name),
           fmt::format("It has {} of {} in all units{}{}.", train::short_bytes(unit.unsharded), train::short_bytes(sum),
                       process > 0 ? fmt::format(", {} of the largest process", percent(unit.unsharded / process)) : "",
                       wait > 0 ? fmt::format("; steps wait {} of their time for it", percent(wait)) : ""),
           fmt::format("Make units of the modules inside it, before it:\n  for (auto& child : module->children())\n    "
                       "tessera::fully_shard(child, options);\n"
                       "or choose by size: wrap_by_size({{.min_params = {:.0f}}}).",
                       unit.parameters / 8),
           {},
           {unit.name}});
    }
  }

  struct UnitsFound {
    std::vector<std::string> names;
    double sum = 0, most = 0;
  };
  /// Units for which `value` is more than nothing.
  UnitsFound units_with(const std::function<double(const RecordedUnit&, const UnitCost&)>& value) const {
    UnitsFound found;
    for (size_t i = 0; i < run_.units.size(); i++) {
      const auto own = value(run_.units[i], all_.units[i]);
      if (own > 0) found.names.push_back(run_.units[i].name), found.sum += own, found.most = std::max(found.most, own);
    }
    return found;
  }

  void small_units() {
    const auto rate = [](const auto&, const UnitCost& cost) { return cost.transfer > 0 ? cost.bytes / cost.transfer : 0; };
    const auto best = units_with(rate).most;
    const auto small = units_with([&](const auto& unit, const auto& cost) {
      return unit.unsharded < kSmallUnit && rate(unit, cost) < 0.25 * best ? cost.transfer / step_ : 0;
    });
    if (small.names.size() < 3 || small.sum < 0.05) return;
    add({"units-too-small",
         fmt::format("{} units are too small", small.names.size()),
         fmt::format("Gathers of {} take {} of a step, at less than a quarter of the rate of larger units.", some_of(small.names),
                     percent(small.sum)),
         "Merge neighbours: .merge_below = 500'000 in the wrap policy, or one fully_shard call for a list of modules.",
         {},
         small.names});
  }

  void late_prefetch() {
    const auto late = units_with([&](const auto&, const auto& cost) { return cost.late_wait > 0.02 * step_ ? cost.late_wait / step_ : 0; });
    if (late.sum < 0.08) return;
    add({"late-prefetch",
         "Gathers begin when their unit is already needed",
         fmt::format("Steps wait {} of their time for such gathers, of {}.", percent(late.sum), some_of(late.names)),
         "In the outermost fully_shard call:\n  .schedule = {.max_live_units = 3, .prefetch_depth = 2}\nor, if there is memory, "
         ".limit_all_gathers = false.",
         {},
         late.names});
  }

  void communication() {
    const auto least = std::ranges::min_element(waits_);
    const auto compute = compute_[least - waits_.begin()];
    if (*least < 0.4 * step_ || *least < compute) return;
    const bool is_one_host = std::ranges::all_of(run_.ranks, [&](const auto& rank) { return rank.host == run_.ranks.front().host; });
    add({"communication-bound", "Steps are mostly communication",
         fmt::format("Even rank {}, which waits least, waits {} of a step and computes {}.", ranks_[least - waits_.begin()],
                     percent(*least / step_), percent(compute / step_)),
         fmt::format("Send less:\n  .mixed_precision = {{.param_dtype = at::kBFloat16}}\n  .reshard_after_forward = false\n  {}\nor "
                     "accumulate gradients over several batches.",
                     is_one_host ? ".residence = tessera::Residence::NodeShared" : ".mesh = tessera::Mesh::by_host(world)")});
  }

  void gathers() {
    const auto lines = run_.ranks[ranks_.front()].lines.size();
    const auto of_start = lines < 3 ? 2 * static_cast<double>(run_.units.size() * ranks_.size()) : 0;  // a first step foresees nothing
    if (misses_ - of_start > 0.5 * steps_)
      add({"order-not-foreseen", "Units are used in changing order",
           fmt::format("{:.1f} uses in a step were not foreseen, so nothing was gathered ahead.", misses_ / steps_),
           "Call modules in the same order in each step, or make one unit of those that change places."});
    if (cancelled_ > 0.05 * gathers_ && cancelled_ > 0.5 * steps_)
      add({"prefetches-cancelled", "Units are gathered ahead and not used",
           fmt::format("{} of {:.0f} gathers were cancelled.", percent(cancelled_ / gathers_), gathers_),
           "Prefetch less far (.schedule = {.prefetch_depth = 1}), and evaluate between steps."});
    auto often = units_with([&](const auto&, const auto& cost) {
      return all_.forwards > 0 && cost.gathers > 2.2 * all_.forwards ? cost.gathers / all_.forwards : 0;
    });
    const auto each = gathers_ / steps_ / std::max<double>(1, static_cast<double>(sizes_.size()));
    if (all_.forwards == 0 && !sizes_.empty() && each > 2.2) often = {{"all units"}, each, each};
    if (often.names.empty()) return;
    add({"double-unshards",
         "Units are gathered more often than twice",
         fmt::format("Up to {:.1f} gathers for a forward and backward pass: {}.", often.most, some_of(often.names)),
         "Let a segment of checkpointing be a whole unit; set .reshard_after_forward = false for a unit that several modules use; in "
         "further batches of a step, "
         "set_reshard_after_backward(module, ReshardAfterBackward::No).",
         {},
         often.names});
  }

  void program() {
    if (const auto other = middle_value(other_) / step_; other > 0.15)
      add({"data-loading", "Steps wait for the program itself, probably for data",
           fmt::format("{} of a step is neither computing nor waiting for ranks nor the optimizer.", percent(other)),
           "Load with more threads, data::LoaderOptions{.workers = 4, .ahead = 8}; report, evaluate and save less often."});
    if (all_.mfu > 0 && all_.mfu < 0.15 && found_.empty())
      add({"low-utilisation", "The processors compute far below their peak",
           fmt::format("{:.1f} % of their FLOPs are the model's, and no other cause was found.", all_.mfu * 100),
           "Make products larger: larger batches, longer rows; compute in bfloat16 where the hardware does."});
  }

  const RecordedRun& run_;
  const Analysis& all_;
  double step_;
  std::vector<int> ranks_;                                // those with steps
  std::vector<double> compute_, waits_, other_, memory_;  // of each of them; seconds are of a step
  std::vector<double> sizes_;                             // unsharded bytes of gathered units
  double steps_ = 0, gathers_ = 0, misses_ = 0, cancelled_ = 0;
  std::vector<Advice> found_;
};

}  // namespace

std::vector<Advice> advice_for(const RecordedRun& run, const Analysis& all) {
  return Adviser(run, all).advice();
}

}  // namespace tessera::cli::reports
