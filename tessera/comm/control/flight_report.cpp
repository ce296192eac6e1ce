#include "tessera/comm/control/flight_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/words.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kOutcomes[] = {"running", "done", "failed"};

/// One operation in the report of a rank.
struct Line {
  uint64_t group = 0, sequence = 0;
  std::string what, outcome;
  double ago = 0, took = 0;  // seconds since it began, and seconds that it ran
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Line, group, sequence, what, outcome, ago, took)

struct Rank {
  std::string place;
  double since = 0;
  bool inside = false;
  std::string trace;
  std::vector<Line> operations;  // the oldest first
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Rank, place, since, inside, trace, operations)

std::string where(const Rank& rank) {
  const auto place = [&] {
    if (rank.place.empty()) return std::string("is before its first unit");
    if (rank.inside) return fmt::format("is in {} for {}", rank.place, duration_text(rank.since));
    return fmt::format("was last in {}, {} ago", rank.place, duration_text(rank.since));
  };
  auto text = place();
  const auto running = std::ranges::find(rank.operations, "running", &Line::outcome);
  if (running != rank.operations.end())
    return text + fmt::format("; waits for {} in {} (operation {})", duration_text(running->ago), running->what, running->sequence);
  if (rank.operations.empty()) return text + "; has begun no operation";
  const auto& last = rank.operations.back();
  return text + fmt::format("; in no operation, the last was {} (operation {}), which {} {} ago", last.what, last.sequence,
                            last.outcome == "done" ? "ended" : "failed", duration_text(last.ago - last.took));
}

/// Describes the first operation of a group that differs between the ranks that have recorded it. Operations before the last one that the
/// group has completed do not count, because its ranks have agreed since.
std::string differences(const std::map<int, Rank>& ranks) {
  std::map<std::pair<uint64_t, uint64_t>, std::map<std::string, std::vector<int>>> whats;
  std::map<uint64_t, uint64_t> completed;  // the last operation of each group
  for (const auto& [number, rank] : ranks) {
    for (const auto& line : rank.operations) {
      whats[{line.group, line.sequence}][line.what].push_back(number);
      if (line.outcome == "done") completed[line.group] = std::max(completed[line.group], line.sequence);
    }
  }
  for (const auto& [operation, variants] : whats) {
    if (variants.size() < 2 || completed[operation.first] > operation.second) continue;
    // Ranks enter tessera::recover from different points of their programs, so that does not count as a difference.
    if (std::ranges::any_of(variants, [](const auto& each) { return each.first.find(kRecovery) != std::string::npos; })) continue;
    auto text = fmt::format("the ranks differ at operation {}:", operation.second);
    for (const auto& [what, numbers] : variants) text += fmt::format("\n  {}: {}", name_ranks(numbers), what);
    return text + "\n";
  }
  return {};
}

}  // namespace

std::string flight_answer(const Record::Snapshot& snapshot, const std::string& trace) {
  Rank own{.place = snapshot.place,
           .since = snapshot.now - snapshot.entered,
           .inside = snapshot.is_inside,
           .trace = trace,
           .operations = {}};
  for (const auto& [entry, what] : snapshot.operations) {
    own.operations.push_back({.group = entry.group,
                              .sequence = entry.sequence,
                              .what = what,
                              .outcome = kOutcomes[static_cast<size_t>(entry.outcome)],
                              .ago = snapshot.now - entry.began,
                              .took = entry.ended - entry.began});
  }
  return json(own).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string flight_report(const std::map<int, std::string>& texts, int world_size) {
  std::map<int, Rank> ranks;
  for (const auto& [number, text] : texts) ranks.emplace(number, json::parse(text).get<Rank>());
  std::string report;
  for (const auto& [number, rank] : ranks) report += fmt::format("rank {} {}\n", number, where(rank));
  std::vector<int> silent;
  for (int number = 0; number < world_size; number++) {
    if (!ranks.contains(number)) silent.push_back(number);
  }
  if (!silent.empty()) report += fmt::format("{} did not answer\n", name_ranks(silent));
  report += differences(ranks);
  for (const auto& [number, rank] : ranks) {
    report += fmt::format("the last operations of rank {}:\n", number);
    const auto shown = std::min<size_t>(rank.operations.size(), 8);
    for (auto line = rank.operations.end() - static_cast<ptrdiff_t>(shown); line != rank.operations.end(); line++) {
      const auto took = line->outcome == "running" ? std::string() : fmt::format(", took {}", duration_text(line->took));
      report += fmt::format("  {} {}: {}, began {} ago{}\n", line->sequence, line->what, line->outcome, duration_text(line->ago), took);
    }
  }
  for (const auto& [number, rank] : ranks) {
    if (!rank.trace.empty()) report += fmt::format("the trace of rank {}: {}\n", number, rank.trace);
  }
  if (report.ends_with('\n')) report.pop_back();  // the log adds the end of the line
  return report;
}

std::vector<int> not_come(const std::map<int, std::string>& answers, uint64_t group, uint64_t sequence, std::span<const int> ranks) {
  std::vector<int> missing;
  if (answers.empty()) return missing;  // no rank could be asked
  for (const int number : ranks) {
    const auto found = answers.find(number);
    const auto has_come = [&](const Line& line) { return line.group == group && line.sequence >= sequence; };
    if (found == answers.end() || std::ranges::none_of(json::parse(found->second).get<Rank>().operations, has_come)) missing.push_back(number);
  }
  return missing;
}

}  // namespace tessera
