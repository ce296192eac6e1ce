// `tessera report`: makes a page of what recorded runs have left in their folders.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"
#include "tessera/cli/report/analysis.h"

namespace tessera {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Advice, name, title, evidence, change, units, ranks)

namespace cli {

extern const char* const kReportPage;  // page.html

namespace reports {
namespace {

using nlohmann::json;

constexpr size_t kCurvePoints = 600;
constexpr int kShownRanks = 16;

/// Five digits are enough for pictures.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const auto scale = std::pow(10, 4 - std::floor(std::log10(std::abs(value))));
  return std::round(value * scale) / scale;
}

/// All ranks; or some of them, at equal distances, and the one that works longest and the one with most memory.
std::vector<int> shown_ranks(const Analysis& all) {
  const auto world = static_cast<int>(all.ranks.size()), shown = std::min(world, kShownRanks);
  std::set<int> ranks;
  for (int i = 0; i < shown; i++) ranks.insert(static_cast<int>(int64_t{i} * world / shown));
  const auto slowest = std::ranges::max_element(all.ranks, {}, &RankLine::work);
  ranks.insert({static_cast<int>(slowest - all.ranks.begin()), all.peak_rank});
  return {ranks.begin(), ranks.end()};
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

/// Curves of each kind of memory of the largest process in the last step, or in the last second if steps are shorter: most kinds are noted
/// some times in a second.
json memory_of(const RecordedRun& run, const Analysis& all) {
  const auto& rank = run.ranks[all.peak_rank];
  auto step = last_steps(rank.events, 1);
  if (!rank.memory.empty()) step.end = std::max(step.end, rank.memory.back().first);
  step.begin = std::min(step.begin, std::max(0.0, step.end - 1));
  std::map<std::string, std::vector<std::pair<double, double>>> kinds;
  for (const auto& [time, memory] : rank.memory) {
    for (const auto& [kind, bytes] : memory) {
      if (time >= step.begin && time <= step.end) kinds[kind].emplace_back(rounded(time - step.begin), bytes);
    }
  }
  json data = {{"rank", all.peak_rank}, {"peak", all.peak_bytes}, {"kinds", json::object()}};
  for (const auto& [kind, points] : kinds) data["kinds"][kind] = curve_of(points);
  return data;
}

/// The last step: [begin, duration, kind, name] in microseconds.
json timeline_of(const RecordedRun& run, const std::vector<int>& shown) {
  StepWindow window;
  for (const int rank : shown) window = window.steps > 0 ? window : last_steps(run.ranks[rank].events, 1);
  auto rows = json::array();
  for (const int rank : shown) {
    auto segments = json::array();
    for (const auto& event : run.ranks[rank].events) {
      if (event.end <= window.begin || event.begin >= window.end || event.category == "pass") continue;
      const auto name = event.unit.empty() ? event.name : event.unit;
      segments.push_back({std::lround((event.begin - window.begin) * 1e6), std::lround((event.end - event.begin) * 1e6), event.category,
                          event.category == "collective" ? event.operation + " " + name : name});
    }
    if (!segments.empty()) rows.push_back({{"rank", rank}, {"segments", segments}});
  }
  return {{"seconds", window.end - window.begin}, {"ranks", rows}};
}

/// The data of a run, which `--json` prints and the page draws. Curves have at most about 600 points, and pictures a part of the ranks.
json data_of(const RecordedRun& run, const Analysis& all, const std::vector<Advice>& advice) {
  const auto shown = shown_ranks(all);
  json data = {{"folder", run.folder.string()},
               {"facts", run.facts},
               {"notes", run.notes},
               {"steps", all.steps},
               {"step_seconds", all.step_seconds},
               {"mfu", all.mfu},
               {"advice", advice},
               {"metrics", json::object()},
               {"ranks", json::array()},
               {"units", json::array()},
               {"waits", {{"from", all.waits_from}, {"seconds", all.watched}, {"ranks", shown}, {"waited", json::array()}}},
               {"memory", memory_of(run, all)},
               {"timeline", timeline_of(run, shown)}};
  data["facts"].erase("units");
  for (int rank = 0; rank < run.world(); rank++) {
    json row = all.ranks[rank];
    double waited = 0;
    for (const auto& other : all.waited) waited += other[rank];
    row.update({{"rank", rank}, {"others_waited", rounded(waited)}});
    data["ranks"].push_back(row);
  }
  for (size_t i = 0; i < run.units.size(); i++) {
    json row = run.units[i];
    row.update(json(all.units[i]));
    data["units"].push_back(row);
  }
  for (const auto& [name, points] : run.metrics) data["metrics"][name] = curve_of(points);
  for (const int one : shown) {
    auto row = json::array();
    for (const int other : shown) row.push_back(rounded(all.waited[one][other]));
    data["waits"]["waited"].push_back(row);
  }
  return data;
}

std::string summary_of(const RecordedRun& run, const Analysis& all, const std::vector<Advice>& advice) {
  const auto cause = run.facts.value("cause", "");
  auto text = fmt::format("{}: {} on {}, {}{}, {} steps", run.folder.string(), run.facts.value("program", "a program"),
                          counted(run.world(), "rank"), run.facts.value("status", "of unknown status"),
                          cause.empty() ? "" : " (" + cause + ")", all.steps);
  if (all.step_seconds > 0) text += fmt::format(", {} each", duration_text(all.step_seconds));
  if (all.mfu > 0) text += fmt::format(", MFU {:.0f} %", all.mfu * 100);
  if (all.peak_bytes > 0) text += fmt::format(", at most {} (rank {})", size_text(all.peak_bytes), all.peak_rank);
  text += '\n';
  for (const auto& note : run.notes) text += fmt::format("note: {}\n", note);
  for (const auto& each : advice) {
    text += fmt::format("\n{}\n  {}\n  {}\n", each.title, each.evidence, CLI::detail::find_and_replace(each.change, "\n", "\n  "));
  }
  if (all.step_seconds > 0) text += advice.empty() ? "nothing to advise\n" : "\n";
  return printable(text, "\n");
}

/// Puts the data into the page. Text of it can't end the script that holds it.
std::string page_with(std::string data) {
  std::string page = kReportPage;
  constexpr std::string_view kPlace = "{{DATA}}";
  return page.replace(page.find(kPlace), kPlace.size(), CLI::detail::find_and_replace(std::move(data), "<", "\\u003c"));
}

struct ReportFlags {
  std::vector<std::string> runs;
  bool as_json = false;
};

void expect_different(const std::vector<std::string>& runs) {
  std::set<std::filesystem::path> seen;
  for (const auto& run : runs) {
    if (!seen.insert(std::filesystem::weakly_canonical(run / std::filesystem::path())).second) throw ConfigError("{} is given twice", run);
  }
}

/// Writes a file of the report, which may be in a folder that belongs to somebody else.
template <class Write>
auto written(const Write& write) try {
  return write();
} catch (const IoError& error) {
  throw IoError("{}; copy the folder of the run there, or print the data with --json", error.what());
}

int report(const ReportFlags& flags) {
  expect_different(flags.runs);
  json data = {{"format", 1}, {"runs", json::array()}};
  for (const auto& folder : flags.runs) {
    auto run = read_run(folder);
    const auto all = analysed(run);
    if (!all.untimed.empty()) run.notes.push_back(all.untimed);
    const auto advice = advice_for(run, all);
    data["runs"].push_back(data_of(run, all, advice));
    if (flags.as_json) continue;
    fmt::print("{}", summary_of(run, all, advice));
    if (const auto trace = written([&] { return write_merged_trace(run); }))
      fmt::print("trace  {} (opens at ui.perfetto.dev)\n", trace->string());
  }
  auto text = data.dump(flags.as_json ? 1 : -1, ' ', false, json::error_handler_t::replace);
  if (flags.as_json) return fmt::print("{}\n", text), 0;
  const auto file = std::filesystem::path(flags.runs.front()) / (flags.runs.size() > 1 ? "comparison.html" : "report.html");
  written([&] { write_text(file, page_with(std::move(text))); });
  fmt::print("page   {}\n", file.string());
  return 0;
}

}  // namespace
}  // namespace reports

void add_report_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("report", "Makes a page and a trace of runs that launch --record has recorded, with advice");
  const auto flags = std::make_shared<reports::ReportFlags>();
  command->add_option("RUN", flags->runs, "The folder of a run; several are compared, in comparison.html of the first")->required();
  command->add_flag("--json", flags->as_json, "Print the data that the page shows, as JSON, and write nothing");
  command->footer(Help::footer_of({"tessera launch -n 4 --record run ./train", "tessera report run", "tessera report run other-run",
                                   "tessera report run --json >run.json"}));
  command->callback([&chosen, flags] { chosen = [flags] { return reports::report(*flags); }; });
}

}  // namespace cli
}  // namespace tessera
