// The causes for which `tessera report` looks, what it takes as evidence, and what it advises.
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tessera/base/middle.h"
#include "tessera/base/words.h"
#include "tessera/cli/report/analysis.h"

namespace tessera::cli::reports {
namespace {

std::string percent(double part) {
  return fmt::format("{:.0f} %", part * 100);
}

/// Looks for one cause after the other.
class Adviser {
 public:
  Adviser(const RecordedRun& run, const Analysis& all) : run_(run), all_(all), step_(all.step_seconds) {
    for (int rank = 0; rank < run.world(); rank++) {
      if (all.ranks[rank].steps > 0) numbers_.push_back(rank), ranks_.push_back(all.ranks[rank]);
    }
  }

  std::vector<Advice> advice() {
    if (ranks_.empty() || step_ <= 0) return {};
    const bool has_times = all_.untimed.empty();
    if (ranks_.size() > 1) {
      if (has_times) slow_rank();
      if (run_.is_timed()) sizes_of_units();
      if (has_times) late_prefetch();
      double_unshards();
      lost_prefetches();
      if (has_times) communication();
    }
    if (has_times) program();
    return std::move(found_);
  }

 private:
  template <class Part>
  double middle(Part part) const {
    std::vector<double> values;
    for (const auto& rank : ranks_) values.push_back(std::invoke(part, rank));
    return middle_of(values).first;
  }

  /// Looks for ranks that work clearly longer than the median while others wait.
  void slow_rank() {
    const auto median = middle(&RankLine::work), longest_wait = std::ranges::max(ranks_, {}, &RankLine::waits).waits();
    std::vector<int> slow;
    for (size_t i = 0; i < ranks_.size(); i++) {
      if (ranks_[i].work() > 1.15 * median && longest_wait - ranks_[i].waits() > 0.05 * step_) slow.push_back(numbers_[i]);
    }
    if (slow.empty()) return;
    const auto& own = all_.ranks[slow.front()];
    double lost = 0;
    for (const auto& rank : ranks_) lost += std::max(0.0, rank.waits() - own.waits());
    found_.push_back({"slow-rank", fmt::format("Slow: {} on {}, for which the others wait", name_ranks(slow), own.host),
                      fmt::format("It computes or loads {} in a step, the median rank {}. The others together lose {} in each step.",
                                  duration_text(own.work()), duration_text(median), duration_text(lost)),
                      "Measure the machines: tessera test --speed. Look for other programs on that host, and for more data on that rank.",
                      {},
                      slow});
  }

  void sizes_of_units() {
    auto units = run_.units;
    for (size_t i = 0; i < units.size(); i++) {
      if (units[i].residence == "node-shared") units[i].unsharded = 0;
      if (all_.untimed.empty()) units[i].waits = all_.units[i].transfer_waits / step_;
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
                      "Let a segment of checkpointing be a whole unit; or options.reshard_after_forward = false;",
                      names});
  }

  void lost_prefetches() {
    double gathers = 0, misses = 0, cancelled = 0;  // in a step of the mean rank
    for (const auto& rank : ranks_) {
      const auto part = 1 / static_cast<double>(ranks_.size());
      gathers += rank.gathers * part, misses += rank.misses * part, cancelled += rank.cancelled * part;
    }
    const bool has_left_out_start = run_.ranks[numbers_.front()].lines.size() > 2;  // the first step foresees nothing
    if (has_left_out_start && misses > 0.5) {
      found_.push_back({"order-not-foreseen", "Units are used in changing order",
                        fmt::format("{:.1f} uses in a step were not foreseen, so nothing was gathered ahead.", misses),
                        "Call modules in the same order in each step, or make one unit of those that change places."});
    }
    if (cancelled > 0.5 && cancelled > 0.05 * gathers) {
      found_.push_back({"prefetches-cancelled", "Units are gathered ahead and not used",
                        fmt::format("{:.1f} of {:.1f} gathers in a step were cancelled.", cancelled, gathers),
                        "options.schedule = {.prefetch_depth = 1};"});
    }
  }

  void communication() {
    const auto least = std::ranges::min(ranks_, {}, &RankLine::waits);
    if (least.waits() < 0.4 * step_ || least.waits() < least.compute) return;
    found_.push_back({"communication-bound", "Steps are mostly communication",
                      fmt::format("Even the rank that waits least waits {} of a step and computes {}.", percent(least.waits() / step_),
                                  percent(least.compute / step_)),
                      "options.mixed_precision = {.param_dtype = at::kBFloat16};\noptions.reshard_after_forward = false;\n"
                      "or accumulate gradients over several batches."});
  }

  void program() {
    if (const auto other = middle(&RankLine::other) / step_; other > 0.15)
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
  std::vector<int> numbers_;     // of the ranks that have made steps
  std::vector<RankLine> ranks_;  // and their mean steps
  std::vector<Advice> found_;
};

}  // namespace

std::vector<Advice> advice_for(const RecordedRun& run, const Analysis& all) {
  return Adviser(run, all).advice();
}

}  // namespace tessera::cli::reports
