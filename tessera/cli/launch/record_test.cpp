// The files that a run leaves with `tessera launch --record`, and the traces after a signal.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/comm/run_facts.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"
#include "tests/testing/net.h"

namespace tessera::testing::launch_record_test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 4;

std::filesystem::path trace_of(const std::filesystem::path& folder, int rank) {
  return folder / fmt::format("trace-{}.json", rank);
}

/// Trains a small net for a step, or with "wait FOLDER", in that folder until there is a file `stop`. With "fail" or
/// "kill", one rank fails.
int train(const std::string& task) {
  const bool waits = task.starts_with("wait ");
  if (waits) std::filesystem::current_path(task.substr(5));
  const auto world = init({.start_limit = kTestLimit, .operation_limit = kTestLimit});
  auto net = sharded_net(world);
  fully_shard(net, {.mesh = world});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.01});
  record_facts(world, {{"peak_flops", 1e12}});
  if (waits && world.rank() == 2) {
    std::printf("%d\n", ::getpid());
    std::fflush(stdout);
  }
  const auto until = std::chrono::steady_clock::now() + kTestLimit;
  for (auto more = at::ones({1}); more.item<float>() != 0;) {
    net(input(world.rank())).square().sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    if (task == "fail" && world.rank() == 1) throw Error("this rank is out of luck");
    if (task == "kill" && world.rank() == 1) ::raise(SIGKILL);
    more.fill_(waits && !std::filesystem::exists("stop") && std::chrono::steady_clock::now() < until ? 1 : 0);
    world.broadcast(more, 0).wait();
  }
  return 0;
}

const ChildTask trains("train and record", train);

Launched::Ended recorded(const std::filesystem::path& folder, const std::string& task) {
  return run(std::to_string(kRanks), {this_program()}, trains.environment(task), {"--record", folder.string()});
}

json parsed(const std::filesystem::path& path) {
  return json::parse(read_file(path));
}

/// Expects the spans of each thread of a rank to follow or to contain each other. Returns their categories.
std::set<std::string> expect_nested(const json& events, int rank) {
  std::map<int, std::vector<std::pair<int64_t, int64_t>>> threads;
  std::set<std::string> categories;
  for (const auto& event : events) {
    EXPECT_EQ(event.at("pid"), rank);
    if (event.at("ph") != "X") continue;
    categories.insert(event.at("cat"));
    EXPECT_GE(event.at("ts").get<int64_t>(), 0) << event;
    threads[event.at("tid")].emplace_back(event.at("ts"), -event.at("dur").get<int64_t>());
  }
  for (auto& [thread, spans] : threads) {
    std::ranges::stable_sort(spans);  // of spans that begin together, the longest first
    std::vector<int64_t> ends;
    for (const auto& [began, length] : spans) {
      while (!ends.empty() && ends.back() <= began) ends.pop_back();
      if (!ends.empty()) {
        EXPECT_LE(began - length, ends.back()) << "rank " << rank << ", thread " << thread;
      }
      ends.push_back(began - length);
    }
  }
  return categories;
}

TEST(Launch, LeavesTheRecordOfARun) {
  const Folder parent;
  const auto folder = parent / "run";
  EXPECT_EQ(recorded(folder, "fail").status, 3);
  auto run = parsed(folder / "run.json");
  EXPECT_EQ(run.at("status"), "failed");
  EXPECT_THAT(run.at("cause").get<std::string>(), AllOf(HasSubstr("rank 1 ended with status 3"), HasSubstr("this rank is out of luck")));
  const auto started = run.at("started").get<double>();
  EXPECT_TRUE(std::filesystem::exists(trace_of(folder, 1)));

  EXPECT_NE(recorded(folder, "kill").status, 0);
  EXPECT_FALSE(std::filesystem::exists(trace_of(folder, 1))) << "of an earlier attempt";

  const auto other = testing::run(std::to_string(kRanks - 1), {this_program()}, trains.environment("train"), {"--record", folder.string()});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.err, HasSubstr("a run on 4 ranks, which can't be continued on 3"));

  const auto again = recorded(folder, "train");  // continues the run
  EXPECT_EQ(again.status, 0) << again.err;
  run = parsed(folder / "run.json");
  EXPECT_EQ(run.at("status"), "done");
  EXPECT_EQ(run.at("started"), started);
  EXPECT_EQ(run.at("earlier").size(), 2);
  EXPECT_EQ(run.at("earlier").at(1).at("status"), "failed");
  EXPECT_FALSE(run.contains("cause"));
  EXPECT_GT(run.at("ended").get<double>(), started);
  EXPECT_EQ(run.at("world"), kRanks);
  EXPECT_EQ(run.at("engine"), "shm");
  EXPECT_EQ(run.at("device"), "cpu");
  EXPECT_EQ(run.at("hosts").size(), kRanks);
  EXPECT_EQ(run.at("peak_flops"), 1e12);
  EXPECT_EQ(run.at("flops_per_step"), nullptr);
  std::set<std::string> units;
  for (const auto& unit : run.at("units")) {
    units.insert(unit.at("name"));
    EXPECT_EQ(unit.at("dtype"), "Float");
    if (unit.at("name") == "b") {
      EXPECT_EQ(unit.at("parameters"), 110);
    }
  }
  EXPECT_EQ(units, (std::set<std::string>{"a", "b", "c"}));
  for (int rank = 0; rank < kRanks; rank++) {
    const auto written = lines(read_file(folder / fmt::format("rank-{}.jsonl", rank)));
    EXPECT_GE(written.size(), 2);
    for (const auto& text : written) {
      const auto line = json::parse(text);
      const auto seconds = [&](const char* key) { return line.at(key).get<double>(); };
      EXPECT_NEAR(seconds("seconds"), seconds("compute") + seconds("unshard") + seconds("reduce") + seconds("optimizer") + seconds("other"), 1e-9);
      EXPECT_GE(seconds("compute"), 0);
      EXPECT_GT(line.at("memory").at("process"), 1 << 20);
    }
    const auto last = json::parse(written.back());
    EXPECT_EQ(last.at("step"), 1);
    EXPECT_GT(last.at("memory").at("optimizer"), 0);
    EXPECT_THAT(last.at("place").get<std::string>(), HasSubstr(" of '"));
    const auto categories = expect_nested(parsed(trace_of(folder, rank)).at("traceEvents"), rank);
    EXPECT_THAT(categories, ::testing::IsSupersetOf({"pass", "unit", "unshard", "reduce", "optimizer", "collective"}));
  }

  const auto refused = recorded(folder, "train");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr(folder.string()), HasSubstr("a run that has finished")));
}

TEST(Launch, RecordsOneJobInAFolderUntilItIsInterrupted) {
  const Folder folder;
  const auto record = folder / "run";
  Launched job(launch(std::to_string(kRanks), {this_program()}, {"--record", record}),
               trains.environment("wait " + folder.path().string()));
  ASSERT_EQ(numbers_in(job.read_line()).size(), 1);
  const auto refused = recorded(record, "train");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("another job is recording"), HasSubstr(record.string())));
  EXPECT_EQ(parsed(record / "run.json").at("status"), "runs");
  ::kill(job.pid(), SIGINT);
  EXPECT_EQ(job.end().status, 128 + SIGINT);
  EXPECT_EQ(parsed(record / "run.json").at("status"), "interrupted");
}

TEST(Launch, SaysThatNothingIsRecorded) {
  const Folder folder;
  const auto ended = run("2", {"true"}, {}, {"--record", folder / "run"});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("the program has not called tessera::init"));
}

TEST(Launch, LetsASignalToOneRankMakeTheTracesOfAll) {
  const Folder folder;
  Launched job(launch(std::to_string(kRanks), {this_program()}), trains.environment("wait " + folder.path().string()));
  const auto pid = numbers_in(job.read_line());
  ASSERT_EQ(pid.size(), 1);
  ::kill(std::stoi(pid.front()), SIGUSR2);
  EXPECT_TRUE(job.says("SIGUSR2. Where the ranks are:"));
  EXPECT_TRUE(job.says("the trace of rank 3: " + trace_of(folder / "tessera-trace", 3).string()));
  write_file(folder / "stop", "");
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 0) << ended.err;
  for (int rank = 0; rank < kRanks; rank++)
    EXPECT_THAT(expect_nested(parsed(trace_of(folder / "tessera-trace", rank)).at("traceEvents"), rank), ::testing::Contains("unshard"));
}

}  // namespace
}  // namespace tessera::testing::launch_record_test
