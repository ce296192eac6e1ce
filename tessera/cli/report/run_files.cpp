#include "tessera/cli/report/run_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/clock.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"

namespace tessera::cli::reports {
namespace {

using nlohmann::json;

constexpr int kLargestWorld = 1 << 16;
constexpr double kLongSilence = 90;  // seconds

bool has_no_trace(const RecordedRank& rank) {
  return rank.events.empty();
}

std::filesystem::path trace_file(const RecordedRun& run, int rank) {
  return run.folder / fmt::format("trace-{}.json", rank);
}

json trace_events(const RecordedRun& run, int rank) {
  return std::move(json::parse(InputFile(trace_file(run, rank)).read_all()).at("traceEvents"));
}

/// The text of a file; of Extent::Ends, about the last `end` bytes.
std::string end_of_file(const std::filesystem::path& path, Extent extent, uint64_t end) {
  if (!size_of_file(path)) return {};
  const InputFile file(path);
  if (extent == Extent::Whole || file.size() <= end) return file.read_all();
  std::string text(end, '\0');
  file.read(text.data(), end, file.size() - end);
  return text.substr(text.find('\n') + 1);
}

/// Calls `take` with each line of a text, and notes how many are not whole.
template <class Take>
void for_each_line(const std::string& file, const std::string& lines, std::vector<std::string>& notes, const Take& take) {
  std::istringstream text(lines);
  int64_t broken = 0;
  for (std::string line; std::getline(text, line);) {
    try {
      take(json::parse(line));
    } catch (const json::exception&) {
      broken++;
    }
  }
  if (broken > 0) notes.push_back(fmt::format("{}: {} left out, not whole", file, counted(broken, "line")));
}

void read_trace(RecordedRun& run, int number) try {
  auto& rank = run.ranks[number];
  if (!size_of_file(trace_file(run, number))) return;
  for (const auto& event : trace_events(run, number)) {
    const auto kind = event.value("ph", ""), name = event.value("name", "");
    const auto args = event.value("args", json::object());
    const auto begin = event.value("ts", 0.0) / 1e6, end = begin + event.value("dur", 0.0) / 1e6;
    if (kind == "C" && name == "memory") rank.memory.emplace_back(begin, args.get<MemoryKinds>());
    if (kind != "X") continue;
    const auto operation = args.value("operation", ""), group = args.value("group", json()).dump();
    const auto key = group + operation + args.value("sequence", json()).dump();
    rank.events.push_back({begin, end, event.value("cat", ""), name, args.value("unit", ""), operation, group, key, begin});
  }
  std::ranges::stable_sort(rank.events, {}, &TraceEvent::begin);
} catch (const json::exception&) {
  run.ranks[number].events.clear();
  run.notes.push_back(trace_file(run, number).filename().string() + " is not whole, and left out");
}

void read_rank(RecordedRun& run, int number, Extent extent) {
  auto& rank = run.ranks[number];
  const auto file = fmt::format("rank-{}.jsonl", number);
  for_each_line(file, end_of_file(run.folder / file, extent, 4 << 10), run.notes, [&](const json& line) {
    rank.lines.push_back(line.get<RankLine>());
    rank.lines.back().time -= run.facts.value("started", 0.0);
    if (!rank.lines.back().host.empty()) rank.host = rank.lines.back().host;
  });
  if (extent == Extent::Whole) read_trace(run, number);
}

/// The calls of each collective, by rank; only those that all ranks of the group still have in their traces.
std::vector<std::map<int, TraceEvent*>> shared_collectives(RecordedRun& run) {
  std::map<std::string, std::map<int, TraceEvent*>> calls;
  std::map<std::string, size_t> sizes;  // of groups
  for (int rank = 0; rank < run.world(); rank++) {
    for (auto& event : run.ranks[rank].events) {
      if (event.category != "collective") continue;
      calls[event.key][rank] = &event;
      sizes[event.group] = std::max({size_t{2}, sizes[event.group], calls[event.key].size()});
    }
  }
  std::vector<std::map<int, TraceEvent*>> shared;
  for (auto& [key, of_ranks] : calls) {
    if (of_ranks.size() == sizes[of_ranks.begin()->second->group]) shared.push_back(std::move(of_ranks));
  }
  return shared;
}

void align_clocks(RecordedRun& run) {
  const auto shared = shared_collectives(run);
  const auto& first = run.ranks.front().host;
  std::map<std::string, std::vector<double>> later;  // by how much collectives end later on a host than on the first one
  for (const auto& calls : shared) {
    const auto reference = std::ranges::find_if(calls, [&](const auto& call) { return run.ranks[call.first].host == first; });
    for (const auto& [rank, call] : calls) {
      const auto& host = run.ranks[rank].host;
      if (host != first && reference != calls.end()) later[host].push_back(call->end - reference->second->end);
    }
  }
  for (auto& [host, differences] : later) {
    std::ranges::nth_element(differences, differences.begin() + std::ssize(differences) / 2);
    run.moved[host] = -differences[differences.size() / 2];
    run.notes.push_back(fmt::format("The clock of {} is ahead by {:.6f} s, and was corrected", host, -run.moved[host]));
  }
  for (auto& rank : run.ranks) {
    const auto moved = run.moved[rank.host];
    for (auto& event : rank.events) event.begin += moved, event.end += moved, event.ready = event.begin;
    for (auto& point : rank.memory) point.first += moved;
  }
  for (const auto& calls : shared) {
    const auto last = std::ranges::max_element(calls, {}, [](const auto& call) { return call.second->begin; });
    for (const auto& [rank, call] : calls) call->ready = std::min(last->second->begin, call->end), call->last = last->first;
  }
}

/// Returns the error that says why there is no run in the folder, and how to record one.
ConfigError no_run_in(const std::filesystem::path& folder) {
  std::error_code unknown;
  if (std::filesystem::is_regular_file(folder, unknown)) {
    const auto parent = folder.parent_path();
    return ConfigError("{} is a file; give the folder of the run: {}", folder, parent.empty() ? "." : parent.string());
  }
  if (const auto traces = names_in(folder, "trace-"); traces && !traces->empty()) {
    return ConfigError("{} has no run.json, only traces, as ranks write them at SIGUSR2: open {} at ui.perfetto.dev", folder,
                       (folder / traces->front()).string());
  }
  return ConfigError("{} has no run.json; start a run first: tessera launch -n N --record {} PROGRAM", folder, folder.string());
}

void note_earlier_attempts(RecordedRun& run) {
  const auto earlier = run.facts.value("earlier", json::array());
  if (earlier.empty()) return;
  const auto files = names_in(run.folder, "metrics-").value_or(std::vector<std::string>());
  const auto& last = earlier.back();
  const auto end = last.value("cause", last.value("status", "") == "failed" ? "failed" : "interrupted");
  run.notes.push_back(fmt::format("{} recorded here before this one (the last: {}); times and memory are those of all{}",
                                  earlier.size() == 1 ? "1 attempt has been" : fmt::format("{} attempts have been", earlier.size()), end,
                                  files.empty() ? "" : fmt::format(", and earlier curves are in {}", fmt::join(files, ", "))));
}

/// Notes which files are missing.
void note_missing(RecordedRun& run, double now) {
  const auto has_no_lines = [](const RecordedRank& rank) { return rank.lines.empty(); };
  if (const auto without = std::ranges::count_if(run.ranks, has_no_lines); without > 0) {
    run.notes.push_back(fmt::format("{} of {} ranks have left no lines: rank-{}.jsonl{} missing or empty", without, run.world(),
                                    std::ranges::find_if(run.ranks, has_no_lines) - run.ranks.begin(),
                                    without > 1 ? " and others are" : " is"));
  }
  const bool runs = run.facts.value("status", "") == "runs";
  if (const auto untraced = std::ranges::count_if(run.ranks, has_no_trace); untraced > 0) {
    run.notes.push_back(fmt::format("{} of {} ranks have no trace: {}", untraced, run.world(),
                                    runs ? "it is written when a run ends, and when a rank gets SIGUSR2"
                                         : "they were killed, could not write it, or have it on another host"));
  }
  double newest = 0;
  for (const auto& rank : run.ranks) newest = std::max(newest, rank.lines.empty() ? 0 : rank.lines.back().time);
  const auto silence = now - run.facts.value("started", now) - newest;
  if (runs && silence > kLongSilence)
    run.notes.push_back(fmt::format("no rank has written for {:.0f} min: the run has been killed, or hangs", silence / 60));
}

}  // namespace

RecordedRun read_run(const std::filesystem::path& folder, Extent extent) {
  const auto file = folder / "run.json";
  if (!size_of_file(file)) throw no_run_in(folder);
  RecordedRun run{folder, {}, {}, {}, {}, {}, {}};
  try {
    run.facts = json::parse(InputFile(file).read_all());
    const auto world = run.facts.at("world").get<int>();
    if (run.facts.value("format", 1) != 1) throw ConfigError("{} is of another format than this version of tessera reads", file);
    if (world < 1 || world > kLargestWorld) throw ConfigError("{} is damaged: its world is {}, not 1 to {}", file, world, kLargestWorld);
    run.units = run.facts.value("units", std::vector<UnitFigures>());
    run.ranks.resize(world);
    const auto hosts = run.facts.value("hosts", std::vector<std::string>());
    for (size_t rank = 0; rank < std::min(hosts.size(), run.ranks.size()); rank++) run.ranks[rank].host = hosts[rank];
    note_earlier_attempts(run);
  } catch (const json::exception&) {
    throw ConfigError("{} is damaged, or is not the run.json of a recorded run; give another run, or record it again in a new folder",
                      file);
  }
  for (int rank = 0; rank < run.world(); rank++) read_rank(run, rank, extent);
  note_missing(run, unix_now());
  for_each_line("metrics.jsonl", end_of_file(folder / "metrics.jsonl", extent, 256 << 10), run.notes, [&](const json& line) {
    for (const auto& [name, value] : line.items()) {
      if (name != "step" && (value.is_number() || value.is_null()))
        run.metrics[name].emplace_back(line.value("step", int64_t{0}),
                                       value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>());
    }
  });
  align_clocks(run);
  return run;
}

std::optional<std::filesystem::path> write_merged_trace(const RecordedRun& run) {
  if (std::ranges::all_of(run.ranks, has_no_trace)) return std::nullopt;
  NewFile merged(run.folder / "trace.json");
  const auto write = [&](std::string_view text) { merged.write(std::as_bytes(std::span(text))); };
  write(R"({"displayTimeUnit":"ms","traceEvents":[)");
  std::string text, separator = "\n";
  for (int rank = 0; rank < run.world(); rank++) {
    if (has_no_trace(run.ranks[rank])) continue;
    for (auto& event : trace_events(run, rank)) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + run.moved.at(run.ranks[rank].host) * 1e6;
      text += std::exchange(separator, ",\n") + event.dump(-1, ' ', false, json::error_handler_t::replace);
    }
    write(std::exchange(text, {}));
  }
  write("\n]}\n");
  merged.commit();
  return run.folder / "trace.json";
}

}  // namespace tessera::cli::reports
