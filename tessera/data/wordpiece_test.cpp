// Texts become tokens, and invalid texts and vocabularies are errors.
#include "tessera/data/wordpiece.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::data::wordpiece_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::Folder;
using ::testing::HasSubstr;
using testing::message_of;
using testing::write_file;

const std::vector<std::string> kVocabulary = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", "!", "a"};

TEST(WordPiece, MakesTheLongestPieces) {
  const WordPiece tokenizer(kVocabulary);
  EXPECT_EQ(tokenizer.size(), 10);
  EXPECT_THAT(tokenizer.tokenize("Unaffable CAF\u00c9!a[SEP]Unaffordable"),
              ElementsAre("un", "##aff", "##able", "cafe", "!", "a", "[SEP]", "[UNK]"));
  EXPECT_THAT(WordPiece(kVocabulary, {.lower_case = false}).tokenize("cafe Cafe"), ElementsAre("cafe", "[UNK]"));
  EXPECT_THAT(tokenizer.tokenize(""), ElementsAre());
}

TEST(WordPiece, PadsAndMarks) {
  const WordPiece tokenizer(kVocabulary);
  const std::vector<std::pair<std::string, std::string>> pairs = {{"a a", "!"}, {"", ""}};
  const auto encoded = tokenizer.encode(pairs);
  EXPECT_TRUE(at::equal(encoded.tokens, at::tensor({2, 9, 9, 3, 8, 3, 2, 3, 3, 0, 0, 0}, at::kLong).view({2, 6})));
  EXPECT_TRUE(at::equal(encoded.types, at::tensor({0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0}, at::kLong).view({2, 6})));
  EXPECT_TRUE(at::equal(encoded.mask, at::tensor({1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0}, at::kLong).view({2, 6})));
  const auto fixed = tokenizer.encode(pairs, {.max_length = 5, .padding = EncodeOptions::Padding::ToMaxLength});
  EXPECT_TRUE(at::equal(fixed.tokens[0], at::tensor({2, 9, 3, 8, 3}, at::kLong)));
  const std::vector<std::string> none;
  EXPECT_EQ(tokenizer.encode(none).tokens.sizes(), at::IntArrayRef({0, 0}));
  EXPECT_THAT(message_of<UsageError>([&] { (void)tokenizer.encode(pairs, {.max_length = 2}); }), HasSubstr("at least 3"));
}

TEST(WordPiece, RefusesTextsThatAreNoUtf8) {
  const WordPiece tokenizer(kVocabulary);
  for (const std::string text : {"caf\xe9 a", "a\xc3", "a\xed\xa0\x80", "a\xc0\x80", "a\xf5\x80\x80\x80"})
    EXPECT_THAT(message_of<UsageError>([&] { (void)tokenizer.tokenize(text); }), AllOf(HasSubstr("not UTF-8"), HasSubstr("0x"))) << text;
}

TEST(WordPiece, IsMadeOfTexts) {
  const std::vector<std::string> texts = {"Bäume, Wald.", "Der Wald [SEP]", "der Baum"};
  const auto tokenizer = WordPiece::of_words(texts, 2);
  EXPECT_THAT(tokenizer.tokenize("Der Wald, Baum wd"), ElementsAre("der", "wald", ",", "b", "##a", "##u", "##m", "w", "##d"));
  EXPECT_THAT(tokenizer.tokenize("x [MASK]"), ElementsAre("[UNK]", "[MASK]"));
  EXPECT_EQ(tokenizer.size(), WordPiece::of_words(texts, 1).size() + 1);
}

TEST(WordPiece, ReadsWhatItHasWritten) {
  const Folder folder;
  WordPiece(kVocabulary, {.lower_case = false, .strip_accents = true}).write(folder / "new/folder");
  EXPECT_THAT(WordPiece::read(folder / "new/folder").tokenize("caf\u00e9 A"), ElementsAre("cafe", "[UNK]"));
  std::filesystem::remove(folder / "new/folder/tokenizer_config.json");
  EXPECT_THAT(WordPiece::read(folder / "new/folder").tokenize("A"), ElementsAre("a"));
}

TEST(WordPiece, NamesTheFileThatIsWrong) {
  const Folder folder;
  const auto refusal = [&] { return message_of<IoError>([&] { WordPiece::read(folder.path()); }); };
  EXPECT_THAT(refusal(), HasSubstr("vocab.txt"));
  write_file(folder / "vocab.txt", "[PAD]\r\n[UNK]\r\n[CLS]\r\na");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("vocab.txt: a vocabulary of 4 tokens lacks [SEP]")));
  write_file(folder / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nb\xff\n");
  EXPECT_THAT(refusal(), HasSubstr("vocab.txt:5: byte 2 of the token is not UTF-8"));
  write_file(folder / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n");
  write_file(folder / "tokenizer_config.json", R"({"do_lower_case": "yes"})");
  EXPECT_THAT(refusal(), HasSubstr("do_lower_case is \"yes\" instead of true or false"));
  write_file(folder / "tokenizer_config.json", "{");
  EXPECT_THAT(refusal(), HasSubstr("tokenizer_config.json is damaged"));
}

}  // namespace
}  // namespace tessera::data::wordpiece_test
