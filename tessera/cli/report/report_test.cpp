// tessera report on runs that the tests write.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::report_test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

/// How a run goes that is written into a folder: units of 4 MB, whose gathers all ranks begin when the unit before computes.
struct Scenario {
  int world = 4;
  double slow = 1;   // rank 1 computes longer by this factor
  bool has_trace = true;
  double clock_of_b = 0;   // the second half of the ranks is on host b, whose clock is ahead
  int gathers = 2;         // of each unit in a step
  double transfer = 0.001, lead = 0.002;  // seconds of a gather, and by how much it begins before its rank waits for it
  double other = 0.001;   // seconds of a step
  int steps = 25;         // of each of the five lines
  std::string device = "cpu";
  std::string residence = "gathered";
};

constexpr double kStarted = 1764500000;
const std::vector<std::string> kUnits = {"embed", "layers.0", "layers.1", "head"};

json event(int rank, int tid, const std::string& category, const std::string& name, double begin, double end, const json& args) {
  return {{"ph", "X"},   {"pid", rank}, {"tid", tid}, {"cat", category}, {"name", name}, {"ts", begin * 1e6}, {"dur", (end - begin) * 1e6},
          {"args", args}};
}

void write_run(const std::filesystem::path& folder, const Scenario& scenario) {
  const auto& [world, slow, has_trace, clock_of_b, gathers, transfer, least_lead, other, steps, device, residence] = scenario;
  std::filesystem::create_directories(folder);
  json units = json::array(), hosts = json::array();
  for (const auto& unit : kUnits) {
    units.push_back({{"name", unit},
                     {"parameters", 1e6},
                     {"unsharded", 4e6},
                     {"shard", 4e6 / world},
                     {"dtype", "Float"},
                     {"residence", residence},
                     {"depth", 1}});
  }
  for (int rank = 0; rank < world; rank++) hosts.push_back(clock_of_b != 0 && rank >= world / 2 ? "b" : "a");
  write_file(folder / "run.json", json{{"format", 1},
                                       {"program", "llama"},
                                       {"command", {"./llama"}},
                                       {"world", world},
                                       {"hosts", hosts},
                                       {"engine", "shm"},
                                       {"device", device},
                                       {"started", kStarted},
                                       {"ended", kStarted + 60},
                                       {"status", "done"},
                                       {"flops_per_step", 4e9},
                                       {"peak_flops", 4e10},
                                       {"units", units}}
                                      .dump());
  std::string metrics;
  for (int step = 1; step <= 20; step++) metrics += json{{"step", step}, {"loss", 2.0 / step}, {"lr", 1e-3}}.dump() + "\n";
  write_file(folder / "metrics.jsonl", metrics);
  const double computing = 0.05;  // of a unit in a step
  std::vector<json> traces(world, json::array());
  double now = 1, waits_of_all = 0;
  int sequence = 0;
  for (int step = 0; step < 3; step++) {
    waits_of_all = 0;
    for (int rank = 0; rank < world; rank++)
      traces[rank].push_back(event(rank, 0, "pass", "forward", now + (hosts[rank] == "b" ? clock_of_b : 0), now + 0.1, json::object()));
    for (size_t gather = 0; gather < gathers * kUnits.size(); gather++) {
      const auto& unit = kUnits[gather % kUnits.size()];
      const double all_begun = now + computing / gathers * slow, end = all_begun + transfer;
      const double lead = least_lead > 0 ? std::max(least_lead, transfer / 3) : 0;
      sequence++;
      for (int rank = 0; rank < world; rank++) {
        const double clock = hosts[rank] == "b" ? clock_of_b : 0, done = now + computing / gathers * (rank == 1 ? slow : 1);
        auto& trace = traces[rank];
        trace.push_back(event(rank, 0, "unit", unit, now + clock, done + clock, {{"pass", "forward"}}));
        trace.push_back(event(rank, 0, "unshard", unit, done + clock, end + clock, {{"unit", unit}}));
        trace.push_back(event(rank, 1, "collective", "all_gather", done - lead + clock, end + clock,
                              {{"operation", "all_gather"}, {"unit", unit}, {"group", "world"}, {"sequence", sequence}, {"bytes", 3e6}}));
      }
      waits_of_all += transfer;
      now = end;
    }
    for (int rank = 0; rank < world; rank++) {
      const double clock = hosts[rank] == "b" ? clock_of_b : 0;
      traces[rank].push_back({{"ph", "C"},
                              {"pid", rank},
                              {"name", "memory"},
                              {"ts", (now - 0.01 + clock) * 1e6},
                              {"args", {{"process", 3e8}, {"unsharded", 8e6}}}});
      traces[rank].push_back(event(rank, 0, "optimizer", "step", now + clock, now + 0.01 + clock, json::object()));
    }
    now += 0.01;
  }
  for (int rank = 0; rank < world; rank++) {
    std::string lines;
    const double longest = computing * slow * 4, own = computing * 4 * (rank == 1 ? slow : 1), unshard = longest - own + waits_of_all,
                 seconds = own + unshard + 0.01 + other;
    for (int line = 1; line <= 5; line++) {
      lines += json{{"time", kStarted + steps * line * seconds},
                    {"step", steps * line},
                    {"steps", steps},
                    {"seconds", steps * seconds},
                    {"compute", steps * own},
                    {"unshard", steps * unshard},
                    {"reduce", 0},
                    {"optimizer", steps * 0.01},
                    {"other", steps * other},
                    {"host", hosts[rank]},
                    {"memory", {{"process", 3e8}, {"shards", 4e6}, {"unsharded", 8e6}}},
                    {"gathers", steps * 4 * gathers},
                    {"reductions", steps * 4},
                    {"gathered_bytes", 1e8},
                    {"misses", line == 1 ? 8 : 0},
                    {"cancelled", 0},
                    {"place", "step"}}
                   .dump() +
               "\n";
    }
    write_file(folder / fmt::format("rank-{}.jsonl", rank), lines);
    if (has_trace) write_file(folder / fmt::format("trace-{}.json", rank), json{{"traceEvents", traces[rank]}}.dump());
  }
}

Launched::Ended report(Command arguments) {
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  arguments.insert(arguments.begin(), {tessera, "report"});
  return Launched(arguments).end();
}

std::vector<std::string> names_of(const json& run) {
  std::vector<std::string> names;
  for (const auto& advice : run.at("advice")) names.push_back(advice.at("name"));
  return names;
}

struct Report : ::testing::Test {
  const Folder folder;

  /// The data of all runs in the folder.
  json all_data() const {
    Command arguments = {"--json"};
    for (size_t i = 0; std::filesystem::exists(folder / std::to_string(i)); i++) arguments.push_back(folder / std::to_string(i));
    const auto ended = report(arguments);
    EXPECT_EQ(ended.status, 0) << ended.err;
    return json::parse(ended.out).at("runs");
  }
  json data(const std::vector<Scenario>& scenarios) const {
    for (size_t i = 0; i < scenarios.size(); i++) write_run(folder / std::to_string(i), scenarios[i]);
    return all_data();
  }
};

TEST_F(Report, HasNoAdviceForAHealthyRun) {
  for (const auto& run : data({{}, {.has_trace = false}, {.world = 1}, {.world = 2, .residence = "node-shared"}, {.clock_of_b = 5}})) {
    EXPECT_THAT(names_of(run), IsEmpty()) << run.at("advice");
    EXPECT_EQ(run.at("steps"), 125);
    EXPECT_GT(run.at("mfu"), 0.15);
  }
}

TEST_F(Report, SeesOtherCauses) {
  const auto runs = data(
      {{.slow = 1.4, .has_trace = false, .residence = "node-shared"}, {.gathers = 4}, {.transfer = 0.01, .lead = 0}, {.other = 0.1}});
  EXPECT_THAT(names_of(runs[0]), ElementsAre("slow-rank"));
  EXPECT_EQ(runs[0]["waits"]["from"], "lines");
  EXPECT_NEAR(runs[0]["waits"]["waited"][0][1], 100 * 4 * 0.02, 1e-3);  // without the first of five lines
  EXPECT_THAT(names_of(runs[1]), ElementsAre("double-unshards"));
  EXPECT_THAT(names_of(runs[2]), ElementsAre("late-prefetch"));
  EXPECT_THAT(names_of(runs[3]), ElementsAre("data-loading"));
}

TEST_F(Report, TakesNoAdviceFromTimesThatTellLittle) {
  const auto runs = data({{.slow = 1.4, .steps = 7}, {.slow = 1.4, .gathers = 4, .transfer = 0.2, .device = "cuda"}});
  EXPECT_THAT(names_of(runs[0]), IsEmpty());
  EXPECT_THAT(runs[0]["notes"].dump(), HasSubstr("fewer than 30 steps"));
  EXPECT_THAT(names_of(runs[1]), ElementsAre("double-unshards"));
  EXPECT_THAT(runs[1]["notes"].dump(), HasSubstr("not of its devices"));
}

TEST_F(Report, AlignsClocksOfHosts) {
  const auto run = data({{.slow = 1.4, .clock_of_b = 5}}).at(0);
  EXPECT_THAT(run["notes"].dump(), HasSubstr("The clock of b is ahead by 5.0000"));
  EXPECT_THAT(names_of(run), ElementsAre("slow-rank"));
  ASSERT_EQ(report({folder / "0"}).status, 0);
  const auto merged = json::parse(read_file(folder / "0/trace.json"));
  std::map<int, std::pair<double, double>> calls;  // the last begin and the first end of each collective
  for (const auto& each : merged.at("traceEvents")) {
    if (each["ph"] != "X" || each["cat"] != "collective") continue;
    const double begin = each["ts"], end = begin + each["dur"].get<double>();
    const auto [call, is_new] = calls.try_emplace(each["args"]["sequence"], begin, end);
    call->second = {std::max(call->second.first, begin), std::min(call->second.second, end)};
  }
  EXPECT_THAT(calls, SizeIs(24));
  for (const auto& [sequence, call] : calls) EXPECT_LE(call.first, call.second) << sequence;
}

TEST_F(Report, WritesAPageThatNoNameCanBreak) {
  write_run(folder / "run", {});
  write_file(folder / "run/metrics.jsonl", R"({"step":1,"</script><b>\"'":1,"loss":null})"
                                           "\n");
  const auto ended = report({folder / "run"});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("llama on 4 ranks, done, 125 steps"), HasSubstr("run/report.html"), HasSubstr("run/trace.json")));
  const auto page = read_file(folder / "run/report.html");
  EXPECT_THAT(page, AllOf(HasSubstr("\\u003c/script>\\u003cb>"), Not(HasSubstr("{{DATA}}")), Not(HasSubstr("http://localhost")),
                          Not(HasSubstr("src="))));
  EXPECT_EQ(page.find("</script>", page.find("</script>", page.find("</script>") + 1) + 1),
            std::string::npos);  // of the data and of the script
}

TEST_F(Report, ReadsWhatIsWhole) {
  write_run(folder / "0", {});
  std::filesystem::resize_file(folder / "0/rank-2.jsonl", std::filesystem::file_size(folder / "0/rank-2.jsonl") - 40);
  std::filesystem::resize_file(folder / "0/trace-1.json", 5000);
  std::filesystem::remove(folder / "0/trace-3.json");
  std::filesystem::remove(folder / "0/rank-3.jsonl");
  write_file(folder / "0/metrics.jsonl", "{\"step\":1,\"loss\":1}\nnonsense\n{\"step\":2,\"lo");
  const auto run = all_data().at(0);
  EXPECT_THAT(run["notes"].dump(), AllOf(HasSubstr("rank-2.jsonl: 1 line left out"), HasSubstr("trace-1.json is not whole"),
                                         HasSubstr("metrics.jsonl: 2 lines left out"),
                                         HasSubstr("2 of 4 ranks have no trace: they were killed"),
                                         HasSubstr("rank-3.jsonl is missing or empty")));
  EXPECT_THAT(names_of(run), IsEmpty());
  EXPECT_THAT(run["metrics"]["loss"], SizeIs(1));
}

TEST_F(Report, TakesARunWithoutSteps) {
  std::filesystem::create_directory(folder / "0");
  write_file(folder / "0/run.json", R"({"format":1,"world":2,"status":"runs","started":1764500000,"ended":null})");
  const auto run = all_data().at(0);
  EXPECT_EQ(run["steps"], 0);
  EXPECT_THAT(names_of(run), IsEmpty());
  EXPECT_EQ(report({folder / "0"}).status, 0);
  EXPECT_FALSE(std::filesystem::exists(folder / "0/trace.json"));
}

TEST_F(Report, TellsOfEarlierAttemptsAndOfTheCause) {
  write_run(folder / "0", {});
  auto facts = json::parse(read_file(folder / "0/run.json"));
  const json before = {{"status", "failed"}, {"cause", "rank 2 ended"}};
  facts.update({{"status", "failed"}, {"cause", "rank 1 was killed"}, {"earlier", json::array({before})}});
  write_file(folder / "0/run.json", facts.dump());
  write_file(folder / "0/metrics-1.jsonl", "{}\n");
  const auto ended = report({folder / "0"});
  EXPECT_THAT(ended.out, AllOf(HasSubstr("failed (rank 1 was killed), 125 steps"), HasSubstr("1 attempt has been recorded here before"),
                               HasSubstr("rank 2 ended"), HasSubstr("metrics-1.jsonl")));
  facts.update({{"status", "runs"}, {"earlier", json::array()}});
  write_file(folder / "0/run.json", facts.dump());
  EXPECT_THAT(report({folder / "0"}).out, HasSubstr("the run has been killed, or hangs"));
  EXPECT_THAT(report({folder / "0", folder / "0/"}).err, HasSubstr("is given twice"));
}

TEST_F(Report, StaysSmallWithManyRanks) {
  write_run(folder / "run", {.world = 512, .slow = 1.4});
  std::string metrics;
  for (int step = 1; step <= 20000; step++) metrics += fmt::format("{{\"step\":{},\"loss\":{}}}\n", step, 1.0 / step);
  write_file(folder / "run/metrics.jsonl", metrics);
  const auto ended = report({folder / "run"});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_LT(std::filesystem::file_size(folder / "run/report.html"), 5'000'000U);
  EXPECT_THAT(ended.out, HasSubstr("Slow: rank 1 on a"));
}

TEST_F(Report, RefusesOtherFolders) {
  EXPECT_THAT(report({folder.path()}).err, HasSubstr("has no run.json; start a run first: tessera launch -n N --record"));
  write_file(folder / "run.json", "{\"world\":");
  EXPECT_THAT(report({folder.path()}).err, HasSubstr("is not the run.json of a recorded run"));
  EXPECT_THAT(report({folder / "run.json"}).err, HasSubstr("is a file; give the folder of the run: " + folder.path().string()));
  write_file(folder / "run.json", R"({"world":-2})");
  EXPECT_THAT(report({folder.path()}).err, HasSubstr("its world is -2"));
  std::filesystem::create_directory(folder / "traces");
  write_file(folder / "traces/trace-0.json", "{}");
  EXPECT_THAT(report({folder / "traces"}).err, HasSubstr("only traces"));
  write_file(folder / "run.json", R"({"format":2,"world":2})");
  const auto ended = report({folder.path()});
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("is of another format"));
}

}  // namespace
}  // namespace tessera::testing::report_test
