// Runs the corpus, and makes the page docs/tables/idioms.md of it.
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <sstream>

#include "idiom.h"
#include "tessera/base/env.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/page.h"

namespace tessera::idioms {
namespace {

constexpr auto kLimit = std::chrono::seconds(5);

struct Trial {
  std::string chapter;
  Idiom idiom;
  friend std::ostream& operator<<(std::ostream& out, const Trial& trial) { return out << trial.idiom.what; }
};

/// The records of every rank.
std::vector<std::vector<at::Tensor>> run(const Idiom& idiom, const Setting& setting) {
  std::vector<std::vector<at::Tensor>> records(static_cast<size_t>(setting.ranks));
  run_ranks(
      setting.ranks,
      [&](const Communicator& world) {
        Run own(world, setting);
        idiom.act(own);
        records[static_cast<size_t>(world.rank())] = own.records();
      },
      {.limit = kLimit});
  return records;
}

std::string name_of(const Setting& setting) {
  return std::to_string(setting.ranks) + " ranks, " + (setting.optimizer == By::Tessera ? "Tessera's" : "torch's") + " optimizer, " +
         (setting.sharded == Residence::Gathered ? "gathered" : "node-shared");
}

void expect_equal(const Idiom& idiom, const Setting& setting, const std::vector<std::vector<at::Tensor>>& expected) {
  const auto actual = run(idiom, setting);
  for (size_t rank = 0; rank < expected.size(); rank++) {
    ASSERT_FALSE(expected[rank].empty()) << "nothing was recorded";
    ASSERT_EQ(actual[rank].size(), expected[rank].size()) << "rank " << rank;
    for (size_t i = 0; i < expected[rank].size(); i++) {
      const auto &one = actual[rank][i], &other = expected[rank][i];
      ASSERT_EQ(one.sizes(), other.sizes()) << "rank " << rank << ", record " << i;
      const bool same = idiom.within == 0 ? at::equal(one, other) : at::allclose(one, other.to(one.scalar_type()), idiom.within, idiom.within);
      ASSERT_TRUE(same) << "rank " << rank << ", record " << i << ": " << one.flatten().slice(0, 0, 8) << " instead of "
                        << other.flatten().slice(0, 0, 8);
    }
  }
}

void expect_refused(const Idiom& idiom, const Setting& setting) {
  std::string said;
  const auto begin = std::chrono::steady_clock::now();
  try {
    run(idiom, setting);
  } catch (const std::exception& error) {
    said = error.what();
  }
  ASSERT_FALSE(said.empty()) << "no error came";
  ASSERT_LT(std::chrono::steady_clock::now() - begin, kLimit) << "only the time limit ended it: " << said;
  const auto& part = setting.sharded == Residence::Gathered && !idiom.gathered.empty() ? idiom.gathered : idiom.refused;
  ASSERT_NE(said.find(part), std::string::npos) << said;
}

class Corpus : public ::testing::TestWithParam<Trial> {};

/// Two ranks with Tessera's optimizers and three with torch's; where there is time, the others as well.
std::vector<Setting> plain_settings() {
  std::vector<Setting> settings = {{.ranks = 2, .optimizer = By::Tessera}, {.ranks = 3, .optimizer = By::Torch}};
  if (env("TESSERA_TEST_ALL_SETTINGS")) {
    settings.push_back({.ranks = 2, .optimizer = By::Torch});
    settings.push_back({.ranks = 3, .optimizer = By::Tessera});
  }
  return settings;
}

TEST_P(Corpus, EndsInTheSameNumbersOrInAnError) {
  const auto& idiom = GetParam().idiom;
  for (const auto& plain : plain_settings()) {
    std::vector<std::vector<at::Tensor>> expected;
    if (idiom.refused.empty()) expected = run(idiom, plain);
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      auto setting = plain;
      setting.sharded = residence;
      SCOPED_TRACE(name_of(setting));
      if (idiom.refused.empty()) {
        expect_equal(idiom, setting, expected);
      } else {
        expect_refused(idiom, setting);
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

std::vector<Trial> trials() {
  std::vector<Trial> result;
  for (const auto& chapter : corpus()) {
    for (const auto& idiom : chapter.idioms) result.push_back({.chapter = chapter.title, .idiom = idiom});
  }
  return result;
}

/// The name of an idiom's test, such as "Hooks_aHookOnAShard": test names may contain only letters and digits.
std::string test_name(const ::testing::TestParamInfo<Trial>& info) {
  const auto camel = [](const std::string& text) {
    std::string result;
    bool upper = false;
    for (const char c : text) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0) {
        upper = true;
      } else {
        result += upper ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
        upper = false;
      }
    }
    return result;
  };
  return camel(info.param.chapter) + "_" + camel(info.param.idiom.what);
}

INSTANTIATE_TEST_SUITE_P(, Corpus, ::testing::ValuesIn(trials()), test_name);

std::string page() {
  std::ostringstream text;
  size_t equal = 0, refused = 0;
  for (const auto& trial : trials()) (trial.idiom.refused.empty() ? equal : refused)++;
  text << "# Idioms\n\n"
          "What programs do with models, and what becomes of it once the model is sharded. Each row is run by the tests: once with plain\n"
          "libtorch and gradients averaged over the ranks, and sharded, in memory that the ranks share and gathered: with 2 ranks and\n"
          "Tessera's optimizers, with 3 ranks and torch's, and under `--long` each with each. It ends in the same numbers, to the bit\n"
          "unless a bound is given, or in an error on the line that causes it. This page is made from the tests:\n"
          "`TESSERA_TEST_WRITE_PAGES=1 ./check idioms/Page`.\n\n"
       << equal + refused << " idioms: " << equal << " equal, " << refused << " refused.\n";
  for (const auto& chapter : corpus()) {
    text << "\n## " << chapter.title << "\n\n| idiom | | what the error says, or what to know |\n| --- | --- | --- |\n";
    for (const auto& idiom : chapter.idioms) {
      text << "| " << idiom.what << " | " << (idiom.refused.empty() ? "equal" : "refused") << " | ";
      if (!idiom.refused.empty()) text << "\"" << idiom.refused << "\"";
      if (!idiom.gathered.empty()) text << ", where gathered \"" << idiom.gathered << "\"";
      if (idiom.within > 0) text << "within " << idiom.within << ": " << idiom.because;
      if (!idiom.remark.empty()) text << (idiom.refused.empty() && idiom.within == 0 ? "" : "; ") << idiom.remark;
      text << " |\n";
    }
  }
  return text.str();
}

TEST(Page, IsMadeFromTheCorpus) {
  testing::expect_page(TESSERA_ROOT "/docs/tables/idioms.md", page(), "idioms/Page");
  EXPECT_GE(trials().size(), 150);
}

}  // namespace
}  // namespace tessera::idioms
