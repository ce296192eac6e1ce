// The causes for which `tessera report` looks, what it takes as evidence, and what it advises.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/words.h"
#include "tessera/cli/report/analysis.h"

namespace tessera::cli::reports {
namespace {

std::string percent(double part) {
  return fmt::format("{:.0f} %", part * 100);
}

/// Seconds in a step of a rank that has made steps.
struct RankTimes {
  int rank = 0;
  double compute = 0, waits = 0, other = 0;
};

/// Looks for one cause after the other.
class Adviser {
 public:
  Adviser(const RecordedRun& run, const Analysis& all) : run_(run), all_(all), step_(all.step_seconds) {
    for (int rank = 0; rank < run.world(); rank++) {
      const auto& total = all.totals[rank];
      if (total.steps == 0) continue;
      ranks_.push_back({rank, total.per_step(total.compute), total.per_step(total.unshard + total.reduce), total.per_step(total.other)});
    }
  }

  std::vector<Advice> advice() {
    if (ranks_.empty() || step_ <= 0) return {};
    if (ranks_.size() > 1) {
      if (!slow_rank()) uneven_work();
      sizes_of_units();
      late_prefetch();
      double_unshards();
      lost_prefetches();
      communication();
    }
    program();
    return std::move(found_);
  }

 private:
  double middle(double RankTimes::*time) const {
    std::vector<double> values;
    for (const auto& rank : ranks_) values.push_back(rank.*time);
    return middle_value(values);
  }

  /// Looks for ranks that compute clearly longer than the median while others wait.
  bool slow_rank() {
    const auto median = middle(&RankTimes::compute), longest_wait = std::ranges::max(ranks_, {}, &RankTimes::waits).waits;
    std::vector<int> slow;
    for (const auto& rank : ranks_) {
      if (rank.compute > 1.15 * median && longest_wait - rank.waits > 0.05 * step_) slow.push_back(rank.rank);
    }
    if (slow.empty()) return false;
    const auto& own = *std::ranges::find(ranks_, slow.front(), &RankTimes::rank);
    double lost = 0;
    for (const auto& rank : ranks_) lost += std::max(0.0, rank.waits - own.waits);
    found_.push_back({"slow-rank", fmt::format("Slow: {} on {}, for which the others wait", name_ranks(slow), run_.ranks[own.rank].host),
                      fmt::format("It computes {} in a step, the median rank {}. The others together lose {} in each step.",
                                  seconds_text(own.compute), seconds_text(median), seconds_text(lost)),
                      "Measure the machines: tessera test --speed. Look for other programs on that host, and for more data on that rank.",
                      {},
                      slow});
    return true;
  }

  void uneven_work() {
    size_t lines = run_.ranks[ranks_.front().rank].lines.size();
    for (const auto& rank : ranks_) lines = std::min(lines, run_.ranks[rank.rank].lines.size());
    double longer = 0;  // by which part of a step the longest computes longer than the median
    for (size_t i = 1; i < lines; i++) {
      std::vector<double> here;
      for (const auto& rank : ranks_) here.push_back(run_.ranks[rank.rank].lines[i].per_step(run_.ranks[rank.rank].lines[i].compute));
      longer += (std::ranges::max(here) - middle_value(here)) / step_ / static_cast<double>(lines - 1);
    }
    const auto waits = middle(&RankTimes::waits) / step_;
    if (longer < 0.1 || waits < 0.1) return;
    found_.push_back({"uneven-work", "Ranks get unequal work, each time another one the most",
                      fmt::format("The longest computes {} of a step longer than the median; ranks wait {} of the time.", percent(longer),
                                  percent(waits)),
                      "Pack rows to one length, or sort samples by length before they are divided among the ranks."});
  }

  void sizes_of_units() {
    std::vector<UnitFacts> units;
    for (size_t i = 0; i < run_.units.size(); i++) {
      const auto& unit = run_.units[i];
      units.push_back({.name = unit.name,
                       .bytes = unit.residence == "node-shared" ? 0 : static_cast<uint64_t>(unit.unsharded),
                       .depth = static_cast<size_t>(unit.depth),
                       .waits = all_.units[i].transfer_waits / step_});
    }
    std::ranges::move(advice_on_units(units, std::max(1.0, all_.peak_bytes)), std::back_inserter(found_));
  }

  void late_prefetch() {
    std::vector<std::string> names;
    double waits = 0;
    for (size_t i = 0; i < run_.units.size(); i++) {
      if (all_.units[i].late_waits < 0.02 * step_) continue;
      names.push_back(run_.units[i].name);
      waits += all_.units[i].late_waits / step_;
    }
    if (waits < 0.08) return;
    found_.push_back({"late-prefetch", "Gathers begin when their unit is already needed",
                      fmt::format("Steps wait {} of their time for such gathers, of {}.", percent(waits), some_of(names)),
                      "options.schedule = {.max_live_units = 3, .prefetch_depth = 2};", names});
  }

  void double_unshards() {
    std::vector<std::string> names;
    double most = 0;
    for (size_t i = 0; i < run_.units.size(); i++) {
      const auto gathers = all_.units[i].gathers / std::max(1.0, all_.forwards);
      if (gathers <= 2.2) continue;
      names.push_back(run_.units[i].name);
      most = std::max(most, gathers);
    }
    if (names.empty()) return;
    found_.push_back({"double-unshards", "Units are gathered more often than twice",
                      fmt::format("Up to {:.1f} gathers for a forward and backward pass: {}.", most, some_of(names)),
                      "Let a segment of checkpointing be a whole unit; set .reshard_after_forward = false for a unit that several modules use.",
                      names});
  }

  void lost_prefetches() {
    RankLine sum;
    for (const auto& total : all_.totals)
      sum.steps += total.steps, sum.gathers += total.gathers, sum.misses += total.misses, sum.cancelled += total.cancelled;
    const bool has_left_out_start = run_.ranks[ranks_.front().rank].lines.size() > 2;  // the first step foresees nothing
    if (has_left_out_start && sum.per_step(sum.misses) > 0.5) {
      found_.push_back({"order-not-foreseen", "Units are used in changing order",
                        fmt::format("{:.1f} uses in a step were not foreseen, so nothing was gathered ahead.", sum.per_step(sum.misses)),
                        "Call modules in the same order in each step, or make one unit of those that change places."});
    }
    if (sum.cancelled > 0.05 * sum.gathers && sum.per_step(sum.cancelled) > 0.5) {
      found_.push_back({"prefetches-cancelled", "Units are gathered ahead and not used",
                        fmt::format("{} of {:.0f} gathers were cancelled.", percent(sum.cancelled / sum.gathers), sum.gathers),
                        "Prefetch less far, options.schedule = {.prefetch_depth = 1}; evaluate between steps."});
    }
  }

  void communication() {
    const auto& least = *std::ranges::min_element(ranks_, {}, &RankTimes::waits);
    if (least.waits < 0.4 * step_ || least.waits < least.compute) return;
    found_.push_back({"communication-bound", "Steps are mostly communication",
                      fmt::format("Even rank {}, which waits least, waits {} of a step and computes {}.", least.rank,
                                  percent(least.waits / step_), percent(least.compute / step_)),
                      "options.mixed_precision = {.param_dtype = at::kBFloat16};\noptions.reshard_after_forward = false;\n"
                      "or accumulate gradients over several batches."});
  }

  void program() {
    if (const auto other = middle(&RankTimes::other) / step_; other > 0.15)
      found_.push_back({"data-loading", "Steps wait for the program itself, probably for data",
                        fmt::format("{} of a step is neither computing nor waiting for ranks nor the optimizer.", percent(other)),
                        "Load with more threads, data::LoaderOptions{.workers = 4, .ahead = 8}; report, evaluate and save less often."});
    if (all_.mfu > 0 && all_.mfu < 0.15 && found_.empty())
      found_.push_back({"low-utilisation", "The processors compute far below their peak",
                        fmt::format("{:.1f} % of their FLOPs are the model's, and no other cause was found.", all_.mfu * 100),
                        "Make products larger: larger batches, longer rows; compute in bfloat16 where the hardware does."});
  }

  const RecordedRun& run_;
  const Analysis& all_;
  double step_;
  std::vector<RankTimes> ranks_;
  std::vector<Advice> found_;
};

}  // namespace

std::vector<Advice> advice_for(const RecordedRun& run, const Analysis& all) {
  return Adviser(run, all).advice();
}

}  // namespace tessera::cli::reports
