// The record of a rank, and what is made from it.
#include "tessera/comm/record.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/clock.h"
#include "tessera/comm/control/envelope.h"
#include "tessera/comm/control/flight_report.h"
#include "tessera/comm/trace.h"
#include "tests/testing/warnings.h"

namespace tessera::testing::record_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Outcome = Record::Outcome;

void note(Record& record, uint64_t sequence, std::string_view unit, Outcome outcome) {
  Envelope envelope{.sequence = sequence};
  envelope.unit.assign_suffix(unit);
  const auto operation = record.begin(1, envelope);
  if (outcome != Outcome::Running) record.end(operation, outcome);
}

/// Two ranks that disagree at operation 6, and then have a barrier or wait.
std::string report_after(Outcome later) {
  Record one, other;
  note(one, 6, "a", Outcome::Failed);
  note(other, 6, "b", Outcome::Failed);
  for (auto* record : {&one, &other}) note(*record, 7, "c", later);
  return flight_report({{0, flight_answer(one.snapshot())}, {1, flight_answer(other.snapshot())}}, 2);
}

TEST(FlightReports, NameTheOperationAtWhichRanksDiffer) {
  EXPECT_THAT(report_after(Outcome::Running),
              HasSubstr("the ranks differ at operation 6:\n  rank 0: barrier of 'a'\n  rank 1: barrier of 'b'"));
}

TEST(FlightReports, DoNotRepeatWhatIsOver) {
  EXPECT_THAT(report_after(Outcome::Done), Not(HasSubstr("differ")));
  EXPECT_FALSE(report_after(Outcome::Done).ends_with('\n'));
}

TEST(FlightReports, SayWhetherARankIsStillWhereItWasLast) {
  Record record;
  const auto report = [&] { return flight_report({{0, flight_answer(record.snapshot(), "/run/trace-0.json")}}, 1); };
  EXPECT_THAT(report(), HasSubstr("rank 0 is before its first unit; has begun no operation"));
  EXPECT_THAT(report(), HasSubstr("\nthe trace of rank 0: /run/trace-0.json"));
  record.enter("forward", "layers.3");  // the library can't see where a forward pass ends
  EXPECT_THAT(report(), HasSubstr("rank 0 was last in forward of 'layers.3', "));
  record.enter("backward", "layers.3");
  EXPECT_THAT(report(), HasSubstr("rank 0 is in backward of 'layers.3' for "));
  record.enter({}, {});
  EXPECT_THAT(report(), HasSubstr("rank 0 was last in backward of 'layers.3', "));
}

/// A clock that stands still until it is set.
struct StoppedClock {
  static inline double now = 1;
  StoppedClock() {
    now = 1;
    set_clock([] { return now; });
  }
  ~StoppedClock() { set_clock(nullptr); }
};

/// From second 1 to 11: a pass over two units, a wait of each kind, a second of other work, and a step.
void train(Record& record) {
  auto& now = StoppedClock::now;
  record.enter("forward", "a");
  const auto unshard = record.begin(Activity::Unshard, "a");
  note(record, 0, "a", Outcome::Running);
  now = 2;
  record.end(unshard);
  now = 3;
  record.enter("forward", "b");
  now = 5;
  record.enter("backward", "b");
  now = 6;
  const auto reduce = record.begin(Activity::Reduce, "b");
  now = 7;
  record.end(reduce);
  now = 8;
  record.enter({}, {});
  record.end_backward(&record);
  now = 9;
  const auto step = record.begin(Activity::Optimizer, {});
  now = 11;
  record.end(step);
}

TEST(Records, CountEachSecondOfTheProgramOnce) {
  const StoppedClock clock;
  Record record;
  record.add_optimizer(&record);
  train(record);
  record.end_step(&clock);
  record.end_step(&record);  // a second optimizer
  const auto times = record.take_times();
  EXPECT_EQ(times.compute, 5);
  EXPECT_EQ(times.unshard, 1);
  EXPECT_EQ(times.reduce, 1);
  EXPECT_EQ(times.optimizer, 2);
  EXPECT_EQ(times.other, 1);
  EXPECT_EQ(times.steps, 1);
  StoppedClock::now = 12;
  EXPECT_EQ(record.take_times().other, 1);
}

TEST(Records, CountBackwardPassesWhereTesseraHasNoOptimizer) {
  const StoppedClock clock;
  Record record;
  int steps = 0;
  record.on_step([&] { steps++; });
  for (int i = 0; i < 3; i++) train(record);
  EXPECT_EQ(steps, 3);
}

nlohmann::json events_of(const Record& record, double base = 0) {
  return nlohmann::json::parse("[" + trace_events(record, base) + "]");
}

TEST(Traces, HaveSpansThatNest) {
  const StoppedClock clock;
  Record record;
  record.rank = 3;
  train(record);
  record.note_memory("unsharded", 96);
  const auto base = record.snapshot().to_unix;
  std::vector<std::string> spans;
  for (const auto& event : events_of(record, base)) {
    EXPECT_EQ(event.at("pid"), 3);
    if (event.at("ph") == "C" && event["args"].contains("unsharded")) {
      EXPECT_EQ(event["args"]["unsharded"], 96);
    }
    if (event.at("ph") != "X") continue;
    const auto began = event.at("ts").get<int64_t>(), end = began + event.at("dur").get<int64_t>();
    spans.push_back(fmt::format("{} {} {} {}-{}", event["tid"].dump(), event["cat"].get<std::string>(), event["name"].get<std::string>(),
                                began / 1'000'000, end / 1'000'000));
  }
  EXPECT_THAT(spans, ElementsAre("0 pass forward 1-5", "0 unit a 1-3", "0 unshard unshard 1-2", "1 collective barrier 1-11", "0 unit b 3-5",
                                 "0 pass backward 5-8", "0 unit b 5-8", "0 reduce reduce 6-7", "0 optimizer optimizer 9-11"));
}

TEST(Traces, HaveTheLastEntriesOfALongRun) {
  Record record;
  for (int i = 0; i < 20'000; i++) record.end(record.begin(Activity::Unshard, std::to_string(i % 10)));
  const auto entries = record.snapshot().entries;
  EXPECT_EQ(entries.size(), 16'384);
  EXPECT_EQ(*entries.back().name, "9");
  EXPECT_EQ(entries.back().outcome, Outcome::Done);
}

TEST(Records, AreLinesOfTheLogWhereItIsToSayMore) {
  const StoppedClock clock;
  const Warnings lines;
  Record record;
  train(record);
  EXPECT_TRUE(lines.texts.empty());
  const auto before = set_log_level(LogLevel::Debug);
  StoppedClock::now = 1;
  train(record);
  set_log_level(before);
  EXPECT_THAT(lines.texts, ::testing::IsSupersetOf({"step 1: unshard of 'a' in forward took 1000.000 ms", "step 1: forward of 'a' took 2000.000 ms",
                                                    "step 1: reduce of 'b' in backward took 1000.000 ms", "step 2: optimizer took 2000.000 ms"}));
}

}  // namespace
}  // namespace tessera::testing::record_test
