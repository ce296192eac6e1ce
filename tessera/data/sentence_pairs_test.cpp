// Pairs of sentences come out of a file as they went in, and lines of another form are named.
#include "tessera/data/sentence_pairs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::data::sentence_pairs_test {
namespace {

using ::testing::AllOf;
using testing::Folder;
using ::testing::HasSubstr;
using testing::message_of;
using testing::write_file;

constexpr auto kHeader = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n";

TEST(SentencePairs, AreReadAsTheyStand) {
  const Folder folder;
  const SentencePairs expected{.sentences = {{"He said \"no\" .", "caf\u00e9"}, {"\"", ""}}, .labels = {1, 0}};
  for (const std::string end : {"\n", "\r\n"}) {
    for (const auto& last : {end, std::string()}) {
      write_file(folder / "train.tsv", "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String" + end +
                                           "1\t1\t2\tHe said \"no\" .\tcaf\u00e9" + end + "0\t3\t4\t\"\t" + last);
      EXPECT_EQ(read_sentence_pairs(folder.path(), Split::Train), expected);
    }
  }
}

TEST(SentencePairs, SurviveAFile) {
  const Folder folder;
  const auto pairs = fake_sentence_pairs({.count = 50});
  write_sentence_pairs(folder / "dev.tsv", pairs);
  EXPECT_EQ(read_sentence_pairs(folder.path(), Split::Test), pairs);
  const SentencePairs broken{.sentences = {{"a", "b\tc"}}, .labels = {0}};
  EXPECT_THAT(message_of<UsageError>([&] { write_sentence_pairs(folder / "x.tsv", broken); }), HasSubstr("pair 0 has a tab"));
}

TEST(SentencePairs, FaultsAreNamedWithTheirLine) {
  const Folder folder;
  const auto refusal = [&](const std::string& text) {
    write_file(folder / "a.tsv", text);
    return message_of<IoError>([&] { read_sentence_pairs(folder / "a.tsv"); });
  };
  EXPECT_THAT(refusal(""), HasSubstr("a.tsv is empty"));
  EXPECT_THAT(refusal("sentence\tlabel\nx\t1\n"), AllOf(HasSubstr("a.tsv:1"), HasSubstr("no column 'Quality', but 'sentence', 'label'")));
  EXPECT_THAT(refusal(kHeader), HasSubstr("has a header and no pairs"));
  EXPECT_THAT(refusal(kHeader + std::string("1\t1\t2\ta\tb\n1\t1\t2\ta\n")), HasSubstr("a.tsv:3: 4 columns, but the header has 5"));
  EXPECT_THAT(refusal(kHeader + std::string("2\t1\t2\ta\tb\n")), HasSubstr("a.tsv:2: Quality is '2', but must be 0, or 1"));
  EXPECT_THAT(refusal(kHeader + std::string("1\t1\t2\ta\tb\n\n1\t1\t2\ta\tb\n")), HasSubstr("a.tsv:3: 1 column, but"));
  EXPECT_THAT(refusal(kHeader + std::string("1\t1\t2\ta\xff\tb\n")), HasSubstr("a.tsv:2: byte 8 of the line is not UTF-8"));
  EXPECT_THAT(message_of<IoError>([&] { read_sentence_pairs(folder.path(), Split::Train); }), HasSubstr("has no train.tsv"));
  EXPECT_THAT(message_of<IoError>([&] { read_sentence_pairs(folder / "no", Split::Train); }), HasSubstr("does not exist"));
}

/// The last five words of a generated sentence, which tell its subject.
std::set<std::string> words_of(const std::string& sentence) {
  std::istringstream in(sentence);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return {words.end() - 5, words.end()};
}

TEST(SentencePairs, GeneratedOnesShareWordsWhereTheyMeanTheSame) {
  const auto pairs = fake_sentence_pairs({.count = 200});
  EXPECT_EQ(pairs, fake_sentence_pairs({.count = 200}));
  EXPECT_NE(pairs, fake_sentence_pairs({.count = 200, .split = Split::Test}));
  EXPECT_NE(pairs, fake_sentence_pairs({.count = 200, .seed = 1}));
  EXPECT_EQ(pairs.sentences[0].first, "Again violin concert rehearsal cello strings");  // on every machine
  std::array<int, 2> sharing = {}, all = {};
  for (size_t i = 0; i < pairs.labels.size(); i++) {
    const auto label = static_cast<size_t>(pairs.labels[i]);
    const auto first = words_of(pairs.sentences[i].first), second = words_of(pairs.sentences[i].second);
    all[label]++;
    sharing[label] += static_cast<int>(std::ranges::any_of(first, [&](const auto& word) { return second.contains(word); }));
  }
  EXPECT_NEAR(all[1], 100, 30);
  EXPECT_EQ(sharing[0], 0);
  EXPECT_EQ(sharing[1], all[1]);
}

}  // namespace
}  // namespace tessera::data::sentence_pairs_test
