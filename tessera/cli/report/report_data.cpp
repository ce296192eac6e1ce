// The data of a run as JSON, small enough for a page.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include "tessera/cli/report/analysis.h"

namespace tessera::cli::reports {
namespace {

using nlohmann::json;

constexpr size_t kCurvePoints = 600, kTimeBins = 120, kSegments = 1000;
constexpr int kMatrixRanks = 32, kTimelineRanks = 16, kTimelineSteps = 2;

/// Five digits are enough for pictures.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const auto scale = std::pow(10, 4 - std::floor(std::log10(std::abs(value))));
  return std::round(value * scale) / scale;
}

/// All ranks; or some of them, at equal distances, and the one that others wait for, the one that computes longest and the one with most
/// memory.
std::vector<int> shown_ranks(const Analysis& all, int most) {
  const auto world = static_cast<int>(all.totals.size());
  std::set<int> shown;
  for (int i = 0; i < std::min(world, most); i++) shown.insert(static_cast<int>(static_cast<int64_t>(i) * world / std::min(world, most)));
  if (world > most) {
    const auto slowest = std::ranges::max_element(all.totals, {}, [](const RankLine& total) { return total.per_step(total.compute); });
    shown.insert({static_cast<int>(slowest - all.totals.begin()), all.peak_rank});
  }
  return {shown.begin(), shown.end()};
}

/// Averages neighbours until few enough points are left; a value that is not finite stays one.
template <class Points>
json curve_of(const Points& points) {
  const auto each = (points.size() + kCurvePoints - 1) / kCurvePoints;
  auto curve = json::array();
  for (size_t i = 0; i < points.size(); i += each) {
    const auto end = std::min(points.size(), i + each);
    double sum = 0;
    for (auto j = i; j < end; j++) sum += points[j].second;
    curve.push_back({points[end - 1].first, rounded(sum / static_cast<double>(end - i))});
  }
  return curve;
}

/// Curves of each kind of memory.
json memory_curves(const std::vector<std::pair<double, MemoryKinds>>& points) {
  std::map<std::string, std::vector<std::pair<double, double>>> kinds;
  for (const auto& [time, bytes] : points) {
    for (const auto& [kind, value] : bytes) kinds[kind].emplace_back(rounded(time), value);
  }
  auto curves = json::object();
  for (const auto& [kind, curve] : kinds) curves[kind] = curve_of(curve);
  return curves;
}

json memory_of(const RecordedRun& run, const Analysis& all) {
  const auto& rank = run.ranks[all.peak_rank];
  std::vector<std::pair<double, MemoryKinds>> lines, step;
  for (const auto& line : rank.lines) lines.emplace_back(line.time, line.memory);
  const auto last = last_steps(rank.events, 1);
  for (const auto& point : rank.memory) {
    if (point.first >= last.begin && point.first <= last.end) step.emplace_back(point.first - last.begin, point.second);
  }
  return {{"rank", all.peak_rank}, {"run", memory_curves(lines)}, {"step", memory_curves(step)}};
}

/// Shares of time over the run, and how long each shown rank computes in a step.
json over_time(const RecordedRun& run, const std::vector<int>& shown) {
  size_t bins = 1;
  double end = 0;
  for (const auto& rank : run.ranks) {
    bins = std::clamp(rank.lines.size(), bins, kTimeBins);
    for (const auto& line : rank.lines) end = std::max(end, line.time);
  }
  constexpr std::pair<const char*, double RankLine::*> kParts[] = {{"compute", &RankLine::compute},
                                                                   {"unshard", &RankLine::unshard},
                                                                   {"reduce", &RankLine::reduce},
                                                                   {"optimizer", &RankLine::optimizer},
                                                                   {"other", &RankLine::other}};
  std::vector<RankLine> sums(bins);
  auto compute = json::array(), at = json::array();
  const auto bin = [&](double time) {
    return std::min(bins - 1, static_cast<size_t>(std::max(0.0, time / end * static_cast<double>(bins))));
  };
  for (int rank = 0; rank < run.world(); rank++) {
    std::vector<RankLine> own(bins);
    for (const auto& line : run.ranks[rank].lines) {
      const auto place = bin(line.time - line.seconds / 2);
      for (auto* sum : {&own[place], &sums[place]}) {
        for (const auto& [name, part] : kParts) sum->*part += line.*part;
        sum->seconds += line.seconds, sum->steps += line.steps;
      }
    }
    if (!std::ranges::binary_search(shown, rank)) continue;
    auto row = json::array();
    for (const auto& sum : own) row.push_back(sum.steps > 0 ? json(rounded(sum.per_step(sum.compute))) : json());
    compute.push_back(row);
  }
  json data = {{"ranks", shown}, {"rank_compute", compute}, {"step_seconds", json::array()}};
  for (size_t i = 0; i < bins; i++) {
    at.push_back(rounded(end * (static_cast<double>(i) + 1) / static_cast<double>(bins)));
    for (const auto& [name, part] : kParts)
      data["shares"][name].push_back(sums[i].seconds > 0 ? json(rounded(sums[i].*part / sums[i].seconds)) : json());
    data["step_seconds"].push_back(sums[i].steps > 0 ? json(rounded(sums[i].per_step(sums[i].seconds))) : json());
  }
  data["at"] = at;
  return data;
}

/// The last steps: [begin, duration, kind, name] in microseconds and places in "kinds" and "names".
json timeline_of(const RecordedRun& run, const std::vector<int>& shown) {
  const std::vector<std::string> kinds = {"unit", "unshard", "reduce", "optimizer", "collective"};
  StepWindow window;
  for (const int rank : shown) {
    if (window.steps == 0) window = last_steps(run.ranks[rank].events, kTimelineSteps);
  }
  std::map<std::string, size_t> names;
  auto rows = json::array();
  bool is_whole = true;
  for (const int rank : shown) {
    std::vector<const TraceEvent*> inside;
    for (const auto& event : run.ranks[rank].events) {
      if (event.end > window.begin && event.begin < window.end && std::ranges::find(kinds, event.category) != kinds.end())
        inside.push_back(&event);
    }
    if (inside.size() > kSegments) {
      is_whole = false;
      std::ranges::nth_element(inside, inside.begin() + kSegments, std::greater(),
                               [](const auto* event) { return event->end - event->begin; });
      inside.resize(kSegments);
      std::ranges::sort(inside, {}, &TraceEvent::begin);
    }
    auto segments = json::array();
    for (const auto* event : inside) {
      const auto name = event->category == "collective" ? event->operation + " " + event->unit
                        : event->unit.empty()           ? event->name
                                                        : event->unit;
      segments.push_back({std::lround((event->begin - window.begin) * 1e6), std::lround((event->end - event->begin) * 1e6),
                          std::ranges::find(kinds, event->category) - kinds.begin(), names.emplace(name, names.size()).first->second});
    }
    if (!segments.empty()) rows.push_back({{"rank", rank}, {"segments", segments}});
  }
  std::vector<std::string> in_order(names.size());
  for (const auto& [name, place] : names) in_order[place] = name;
  return {{"steps", window.steps}, {"seconds", window.end - window.begin},
          {"begin", window.begin}, {"kinds", kinds},
          {"names", in_order},     {"ranks", rows},
          {"whole", is_whole}};
}

}  // namespace

json data_of(const RecordedRun& run) {
  const auto all = analysed(run);
  json data = {{"folder", run.folder.string()},
               {"facts", run.facts},
               {"notes", run.notes},
               {"clocks_moved", run.moved},
               {"steps", all.steps},
               {"step_seconds", all.step_seconds},
               {"peak_memory", {{"rank", all.peak_rank}, {"bytes", 0}}},
               {"mfu", all.mfu},
               {"advice", advice_for(run, all)},
               {"ranks", json::array()},
               {"units", json::array()}};
  data["facts"].erase("units");
  double newest = run.facts.value("started", 0.0), worst = -1;
  for (int rank = 0; rank < run.world(); rank++) {
    json row = all.totals[rank];
    row["rank"] = rank;
    row["host"] = run.ranks[rank].host;
    row["others_waited"] = rounded(all.waits_for(rank));
    data["ranks"].push_back(row);
    newest = std::max(newest, run.facts.value("started", 0.0) + all.totals[rank].time);
    if (rank == all.peak_rank) data["peak_memory"]["bytes"] = row["memory"].value("process", 0.0);
    if (const auto waited = all.waits_for(rank); waited > worst)
      worst = waited, data["worst_wait"] = {{"rank", rank}, {"seconds", rounded(waited)}};
  }
  const auto now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (run.facts.value("status", "") == "runs") data["silent_seconds"] = rounded(std::max(0.0, now - newest));
  for (size_t i = 0; i < run.units.size(); i++) {
    json row = run.units[i];
    row.update(json(all.units[i]));
    data["units"].push_back(row);
  }
  for (const auto& [name, points] : run.metrics) data["metrics"][name] = curve_of(points);
  const auto in_matrix = shown_ranks(all, kMatrixRanks);
  data["waits"] = {{"from", all.waits_from}, {"seconds", all.watched}, {"ranks", in_matrix}, {"waited", json::array()}};
  for (const int one : in_matrix) {
    auto row = json::array();
    for (const int other : in_matrix) row.push_back(rounded(all.waited[one][other]));
    data["waits"]["waited"].push_back(row);
  }
  data["time"] = over_time(run, in_matrix);
  data["memory"] = memory_of(run, all);
  data["timeline"] = timeline_of(run, shown_ranks(all, kTimelineRanks));
  return data;
}

}  // namespace tessera::cli::reports
