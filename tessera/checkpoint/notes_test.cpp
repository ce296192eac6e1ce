#include "tessera/checkpoint/notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tessera/data/sampler.h"
#include "tessera/optim/learning_rate.h"
#include "tests/testing/transports.h"

namespace tessera::checkpoint::notes_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

template <class T>
void expect_kept(const T& value) {
  Notes notes;
  notes["it"] = value;
  EXPECT_EQ(notes.at("it").as<T>(), value) << notes.at("it").text();
}

TEST(Notes, KeepEveryBit) {
  expect_kept(std::string("größe\n\""));
  expect_kept(true);
  expect_kept(false);
  for (const auto value : {std::numeric_limits<int64_t>::min(), int64_t{0}, std::numeric_limits<int64_t>::max()}) expect_kept(value);
  expect_kept(std::numeric_limits<uint64_t>::max());
  expect_kept(-7);
  for (const double value : {0.1, -0.0, 1e300 / 3, std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::infinity()}) {
    expect_kept(value);
    EXPECT_EQ(std::signbit(Note(value).as<double>()), std::signbit(value));
  }
  expect_kept(0.1F);
  expect_kept(data::Position{.epoch = 3, .batch = 17});
  expect_kept(optim::LearningRate{.base = 1.0 / 3, .warmup = 4});
  EXPECT_EQ(Note(0.1).text(), "0.1");
  EXPECT_EQ((Notes{{"step", 3}, {"text", "a"}}), (Notes{{"text", std::string("a")}, {"step", int64_t{3}}}));
}

TEST(Notes, ErrorsNameTheNote) {
  const Notes notes{{"step", "3x"}, {"loss", 0.5}, {"large", 3'000'000'000}, {"empty", ""}};
  const auto refusal = [&]<class T>(const char* name, const T&) { return message_of<UsageError>([&] { (void)notes.at(name).as<T>(); }); };
  EXPECT_THAT(refusal("stop", 0), AllOf(HasSubstr("no note 'stop'"), HasSubstr("'step'")));
  EXPECT_THAT(refusal("step", int64_t{}), AllOf(HasSubstr("the note 'step' is '3x'"), HasSubstr("not an integer")));
  EXPECT_THAT(refusal("loss", int64_t{}), HasSubstr("the note 'loss' is '0.5'"));
  EXPECT_THAT(refusal("large", int32_t{}), HasSubstr("'large'"));
  EXPECT_THAT(refusal("empty", double{}), HasSubstr("not a number"));
  EXPECT_THAT(refusal("loss", bool{}), HasSubstr("neither true nor false"));
  EXPECT_THAT(refusal("loss", data::Position{}), AllOf(HasSubstr("the note 'loss'"), HasSubstr("is not a position")));
  EXPECT_THAT(message_of<UsageError>([] { (void)Notes().at("step"); }), HasSubstr("there are none"));
  Notes more = notes;
  EXPECT_THAT(message_of<UsageError>([&] { (void)more["loss"].as<bool>(); }), HasSubstr("the note 'loss'"));
}

}  // namespace
}  // namespace tessera::checkpoint::notes_test
