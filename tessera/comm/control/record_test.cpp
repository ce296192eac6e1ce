#include "tessera/comm/control/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::testing::flight_recorder_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Outcome = FlightRecorder::Outcome;

void note(FlightRecorder& recorder, uint64_t sequence, std::string_view unit, Outcome outcome) {
  Envelope envelope{.sequence = sequence};
  envelope.unit.assign_suffix(unit);
  const auto operation = recorder.begin(1, envelope);
  if (outcome != Outcome::Running) recorder.end(operation, outcome);
}

/// Two ranks that disagree at operation 6, and then have a barrier or wait.
std::string report_after(Outcome later) {
  FlightRecorder one, other;
  note(one, 6, "a", Outcome::Failed);
  note(other, 6, "b", Outcome::Failed);
  for (auto* recorder : {&one, &other}) note(*recorder, 7, "c", later);
  return flight_report({{0, one.to_json()}, {1, other.to_json()}}, 2);
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
  FlightRecorder recorder;
  const auto report = [&] { return flight_report({{0, recorder.to_json()}}, 1); };
  EXPECT_THAT(report(), HasSubstr("rank 0 is before its first unit; has begun no operation"));
  recorder.enter("forward", "layers.3");  // the library can't see where a forward pass ends
  EXPECT_THAT(report(), HasSubstr("rank 0 was last in forward of 'layers.3', "));
  recorder.enter("backward", "layers.3");
  EXPECT_THAT(report(), HasSubstr("rank 0 is in backward of 'layers.3' for "));
  recorder.enter({}, {});
  EXPECT_THAT(report(), HasSubstr("rank 0 was last in backward of 'layers.3', "));
}

}  // namespace
}  // namespace tessera::testing::flight_recorder_test
