#include "tessera/cli/report/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <sstream>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"

namespace tessera::cli::reports {
namespace {

using nlohmann::json;

constexpr int kLargestWorld = 1 << 16;

json parsed_json(const std::string& text) {
  return json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::filesystem::path trace_file(const RecordedRun& run, int rank) {
  return run.folder / fmt::format("trace-{}.json", rank);
}

/// Returns the events of a rank's trace; nothing if there is none. Notes that a trace is not whole.
json trace_events(const RecordedRun& run, int rank, std::vector<std::string>& notes) {
  const auto file = trace_file(run, rank);
  if (!size_of_file(file)) return json::array();
  auto trace = parsed_json(InputFile(file).read_all());
  if (trace.is_object() && trace["traceEvents"].is_array()) return std::move(trace["traceEvents"]);
  notes.push_back(file.filename().string() + " is not whole, and left out");
  return json::array();
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

void read_rank(RecordedRun& run, int number, Extent extent) {
  auto& rank = run.ranks[number];
  const auto started = run.facts.value("started", 0.0);
  const auto file = fmt::format("rank-{}.jsonl", number);
  for_each_line(file, end_of_file(run.folder / file, extent, 4 << 10), run.notes, [&](const json& line) {
    rank.lines.push_back(line.get<RankLine>());
    rank.lines.back().time -= started;
    if (!rank.lines.back().host.empty()) rank.host = rank.lines.back().host;
  });
  if (extent == Extent::Ends) return;
  for (const auto& event : trace_events(run, number, run.notes)) {
    try {
      const auto kind = event.value("ph", ""), name = event.value("name", "");
      const auto args = event.value("args", json::object());
      const auto begin = event.value("ts", 0.0) / 1e6, end = begin + event.value("dur", 0.0) / 1e6;
      if (kind == "C" && name == "memory") rank.memory.emplace_back(begin, args.get<MemoryKinds>());
      if (kind != "X") continue;
      const auto operation = args.value("operation", "");
      const auto key = args.value("group", json()).dump() + '#' + operation + args.value("sequence", json()).dump();
      rank.events.push_back(
          {begin, end, event.value("cat", ""), name, args.value("unit", ""), operation, key, args.value("bytes", 0.0), begin});
    } catch (const json::exception&) {  // an event of another tool
    }
  }
  std::ranges::stable_sort(rank.events, {}, &TraceEvent::begin);
}

/// The calls of each collective, by rank; only those that all ranks of the group still have in their traces.
std::vector<std::map<int, TraceEvent*>> shared_collectives(RecordedRun& run) {
  std::map<std::string, std::map<int, TraceEvent*>> calls;
  for (int rank = 0; rank < run.world(); rank++) {
    for (auto& event : run.ranks[rank].events) {
      if (event.category == "collective") calls[event.key][rank] = &event;
    }
  }
  const auto group = [](const std::string& key) { return key.substr(0, key.rfind('#')); };
  std::map<std::string, size_t> sizes;
  for (const auto& [key, of_ranks] : calls) sizes[group(key)] = std::max({size_t{2}, sizes[group(key)], of_ranks.size()});
  std::vector<std::map<int, TraceEvent*>> shared;
  for (auto& [key, of_ranks] : calls) {
    if (of_ranks.size() == sizes[group(key)]) shared.push_back(std::move(of_ranks));
  }
  return shared;
}

/// What is known about a clock: the differences of ends, of which the median counts, and between which numbers it must be.
struct ClockEvidence {
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  std::vector<double> ends;
};

void align_clocks(RecordedRun& run) {
  const auto shared = shared_collectives(run);
  std::map<std::string, ClockEvidence> clocks;
  for (const auto& calls : shared) {
    std::map<std::string, std::pair<double, double>> hosts;  // the last begin and the first end on each
    for (const auto& [rank, call] : calls) {
      const auto [host, is_new] = hosts.try_emplace(run.ranks[rank].host, call->begin, call->end);
      host->second = {std::max(host->second.first, call->begin), std::min(host->second.second, call->end)};
    }
    const auto first = hosts.find(run.ranks.front().host);
    for (auto host = hosts.begin(); first != hosts.end() && host != hosts.end(); ++host) {
      auto& clock = clocks[host->first];
      clock.least = std::max(clock.least, host->second.first - first->second.second);
      clock.most = std::min(clock.most, host->second.second - first->second.first);
      clock.ends.push_back(host->second.second - first->second.second);
    }
  }
  for (auto& [name, clock] : clocks) {
    std::ranges::nth_element(clock.ends, clock.ends.begin() + std::ssize(clock.ends) / 2);
    const auto middle = clock.ends[clock.ends.size() / 2];
    if (name != run.ranks.front().host)
      run.moved[name] = -(clock.least <= clock.most ? std::clamp(middle, clock.least, clock.most) : middle);
  }
  for (auto& rank : run.ranks) {
    const auto moved = run.moved.find(rank.host);
    if (moved == run.moved.end()) continue;
    for (auto& event : rank.events) event.begin += moved->second, event.end += moved->second, event.ready = event.begin;
    for (auto& point : rank.memory) point.first += moved->second;
  }
  for (const auto& calls : shared) {
    const auto last = std::ranges::max_element(calls, {}, [](const auto& call) { return call.second->begin; });
    for (const auto& [rank, call] : calls) call->ready = std::min(last->second->begin, call->end), call->last = last->first;
  }
}

}  // namespace

RecordedRun read_run(const std::filesystem::path& folder, Extent extent) {
  const auto file = folder / "run.json";
  if (!size_of_file(file)) throw ConfigError("{} has no run.json; record one with tessera launch --record {} PROGRAM", folder, folder);
  RecordedRun run{folder, parsed_json(InputFile(file).read_all()), {}, {}, {}, {}, {}};
  try {
    const auto world = run.facts.at("world").get<int>();
    if (run.facts.value("format", 1) != 1 || world < 1 || world > kLargestWorld)
      throw ConfigError("{} is of another format than this version of tessera reads", file);
    run.units = run.facts.value("units", std::vector<RecordedUnit>());
    run.ranks.resize(world);
    const auto hosts = run.facts.value("hosts", std::vector<std::string>());
    for (size_t rank = 0; rank < std::min(hosts.size(), run.ranks.size()); rank++) run.ranks[rank].host = hosts[rank];
  } catch (const json::exception& error) {
    throw ConfigError("{} is not the run.json of a recorded run: {}", file, error.what());
  }
  std::vector<int> untraced;
  for (int rank = 0; rank < run.world(); rank++) {
    read_rank(run, rank, extent);
    if (run.ranks[rank].events.empty()) untraced.push_back(rank);
  }
  if (!untraced.empty())
    run.notes.push_back(fmt::format("{} of {} ranks have no trace: it is written when a run ends, and when a rank gets SIGUSR2",
                                    untraced.size(), run.world()));
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
  const auto has_trace = [](const RecordedRank& rank) { return !rank.events.empty(); };
  if (std::ranges::none_of(run.ranks, has_trace)) return std::nullopt;
  NewFile merged(run.folder / "trace.json");
  std::string text = R"({"displayTimeUnit":"ms","traceEvents":[)";
  const char* separator = "\n";
  for (int rank = 0; rank < run.world(); rank++) {
    const auto moved = run.moved.find(run.ranks[rank].host);
    std::vector<std::string> noted;
    for (auto& event : trace_events(run, rank, noted)) {
      if (moved != run.moved.end() && event.is_object() && event.value("ts", json()).is_number())
        event["ts"] = event["ts"].get<double>() + moved->second * 1e6;
      text += separator + event.dump(-1, ' ', false, json::error_handler_t::replace);
      separator = ",\n";
    }
    merged.write(std::as_bytes(std::span(text)));
    text.clear();
  }
  merged.write(std::as_bytes(std::span(std::string_view("\n]}\n"))));
  merged.commit();
  return run.folder / "trace.json";
}

}  // namespace tessera::cli::reports
