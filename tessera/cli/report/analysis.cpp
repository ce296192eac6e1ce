#include "tessera/cli/report/analysis.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "tessera/base/middle.h"

namespace tessera::cli::reports {
namespace {

constexpr double RankLine::*kParts[] = {&RankLine::seconds, &RankLine::compute, &RankLine::unshard, &RankLine::reduce, &RankLine::optimizer,
                                        &RankLine::other, &RankLine::gathers, &RankLine::misses, &RankLine::cancelled};

constexpr int64_t kLeastSteps = 30;

/// The mean step of a rank, without its first line, which has the start, where there are others.
RankLine mean_step(const RecordedRank& rank) {
  RankLine mean;
  for (size_t i = 0; i < rank.lines.size(); i++) {
    const auto& line = rank.lines[i];
    for (const auto& [kind, bytes] : line.memory) mean.memory[kind] = std::max(mean.memory[kind], bytes);
    mean.time = line.time, mean.step = line.step, mean.place = line.place;
    if (i == 0 && rank.lines.size() >= 3) continue;
    mean.steps += line.steps;
    for (const auto part : kParts) mean.*part += line.*part;
  }
  for (const auto part : kParts) mean.*part = mean.per_step(mean.*part);
  mean.host = rank.host;
  return mean;
}

/// The waits of a rank's program, which do not overlap, in their order.
std::vector<TraceEvent> waits_in(const std::vector<TraceEvent>& events) {
  std::vector<TraceEvent> waits;
  std::ranges::copy_if(events, std::back_inserter(waits),
                       [](const auto& event) { return event.category == "unshard" || event.category == "reduce"; });
  return waits;
}

/// For how long the program waited in a time.
double waited_in(const std::vector<TraceEvent>& waits, double begin, double end) {
  double sum = 0;
  for (auto wait = std::ranges::upper_bound(waits, begin, {}, &TraceEvent::end); wait != waits.end() && wait->begin < end; ++wait)
    sum += std::max(0.0, std::min(end, wait->end) - std::max(begin, wait->begin));
  return sum;
}

bool is_forward_pass(const TraceEvent& event) {
  return event.category == "pass" && event.name.find("forward") != std::string::npos;
}

void add_costs(const RecordedRun& run, Analysis& all) {
  std::map<std::string, UnitCost> costs;
  double traced = 0;
  for (const auto& rank : run.ranks) traced += last_steps(rank.events).steps > 0 ? 1 : 0;
  for (const auto& rank : run.ranks) {
    const auto steps = last_steps(rank.events);
    const auto each = 1 / (traced * steps.steps);
    const auto waits = waits_in(rank.events);
    for (const auto& event : rank.events) {
      if (event.begin < steps.begin || event.begin >= steps.end) continue;
      const auto seconds = (event.end - event.begin) * each;
      if (is_forward_pass(event)) all.forwards += each;
      auto& cost = costs[event.unit.empty() && event.category == "unit" ? event.name : event.unit];
      if (event.category == "unit") cost.compute += seconds;
      if (event.category == "unshard" || event.category == "reduce") cost.waits += seconds;
      if (event.operation != "all_gather") continue;
      cost.gathers += each, cost.transfer += (event.end - event.ready) * each;
      const auto waited = waited_in(waits, event.ready, event.end) * each;
      cost.transfer_waits += waited;
      // Late: the program waits for it already, or begins to before a quarter of its transfer could be done.
      const auto wait = std::ranges::upper_bound(waits, event.begin, {}, &TraceEvent::end);
      if (wait != waits.end() && wait->unit == event.unit && wait->begin < event.begin + (event.end - event.ready) / 4)
        cost.late_waits += waited;
    }
  }
  for (const auto& unit : run.units) all.units.push_back(costs[unit.name]);
}

/// A rank waits for the last one that begins a collective, as far as its program waits at all.
void add_waits_of_trace(const RecordedRun& run, Analysis& all) {
  double begin = std::numeric_limits<double>::infinity(), end = 0, sum = 0;
  for (int rank = 0; rank < run.world(); rank++) {
    const auto waits = waits_in(run.ranks[rank].events);
    for (const auto& event : run.ranks[rank].events) {
      if (event.last < 0) continue;
      begin = std::min(begin, event.begin), end = std::max(end, event.end);
      const auto waited = event.unit.empty() ? event.ready - event.begin : waited_in(waits, event.begin, event.ready);
      if (waited < 1e-6) continue;  // rounding
      all.waited[rank][event.last] += waited, sum += waited;
    }
  }
  if (sum > 0) all.waits_from = "trace", all.watched = end - begin;
}

/// Where no collectives tell, as with node-shared units: what a rank waits longer than the one that waits least, it waits for the one that
/// works longest.
void add_waits_of_lines(Analysis& all) {
  const auto& last = *std::ranges::max_element(all.ranks, {}, &RankLine::work);
  const auto least = std::ranges::min(all.ranks, {}, &RankLine::waits).waits();
  all.waits_from = "lines", all.watched = last.seconds * static_cast<double>(last.steps);
  for (size_t rank = 0; rank < all.ranks.size(); rank++) {
    const auto& own = all.ranks[rank];
    if (own.work() < 0.95 * last.work())
      all.waited[rank][&last - all.ranks.data()] = (own.waits() - least) * static_cast<double>(own.steps);
  }
}

}  // namespace

StepWindow last_steps(const std::vector<TraceEvent>& events, int most) {
  std::vector<double> ends;  // of steps: of the last event of the optimizer, or else of backward, before another forward pass or the end
  double optimizer = -1;
  const bool has_optimizer = std::ranges::any_of(events, [](const auto& event) { return event.category == "optimizer"; });
  for (const auto& event : events) {
    if (has_optimizer ? event.category == "optimizer" : event.category == "pass" && event.name == "backward")
      optimizer = std::max(optimizer, event.end);
    if (is_forward_pass(event) && optimizer >= 0) ends.push_back(std::exchange(optimizer, -1));
  }
  if (optimizer >= 0) ends.push_back(optimizer);
  if (ends.empty()) return {};
  if (ends.size() == 1) return {events.front().begin, ends.front(), 1};
  const auto steps = std::min(most, static_cast<int>(ends.size()) - 1);
  return {ends[ends.size() - 1 - steps], ends.back(), steps};
}

Analysis analysed(const RecordedRun& run) {
  Analysis all;
  all.waited.assign(run.ranks.size(), std::vector<double>(run.ranks.size()));
  std::vector<double> seconds;
  for (const auto& rank : run.ranks) {
    auto& mean = all.ranks.emplace_back(mean_step(rank));
    if (mean.steps > 0) seconds.push_back(mean.seconds);
    all.steps = std::max(all.steps, mean.step);
    if (mean.memory["process"] > all.peak_bytes)
      all.peak_rank = static_cast<int>(all.ranks.size()) - 1, all.peak_bytes = mean.memory["process"];
  }
  all.step_seconds = middle_of(seconds).first;
  const auto flops = run.facts.value("flops_per_step", nlohmann::json()), peak = run.facts.value("peak_flops", nlohmann::json());
  if (flops.is_number() && peak.is_number() && peak > 0 && all.step_seconds > 0)
    all.mfu = flops.get<double>() / peak.get<double>() / all.step_seconds;
  const auto steps = all.ranks.empty() ? 0 : std::ranges::max(all.ranks, {}, &RankLine::steps).steps;
  if (!run.is_timed()) {
    all.untimed = "times are those of the host, not of its devices, so there is no advice from them";
  } else if (all.step_seconds > 0 && steps < kLeastSteps) {
    all.untimed = fmt::format("times of fewer than {} steps give no advice", kLeastSteps);
  }
  add_costs(run, all);
  add_waits_of_trace(run, all);
  if (all.waits_from.empty() && seconds.size() > 1) add_waits_of_lines(all);
  return all;
}

}  // namespace tessera::cli::reports
