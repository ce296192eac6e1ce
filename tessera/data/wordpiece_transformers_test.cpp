// WordPiece makes the tokens that transformers' BertTokenizer makes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tessera/data/unicode.h"
#include "tessera/data/wordpiece.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"

namespace tessera::data::wordpiece_transformers_test {
namespace {

using nlohmann::json;
using testing::Folder;

testing::Ended run_script(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/bert_tokens.py"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return testing::run_program(command);
}


std::vector<std::string> hard_texts() {
  std::string every_ascii, every_latin;
  for (char c = 1; c < 127; c++) every_ascii += std::string("a") + c;
  for (int c = 0x80; c < 0x800; c++)
    every_latin += std::string("a") + static_cast<char>(0xC0 | c >> 6) + static_cast<char>(0x80 | (c & 0x3F)) + "e";
  return {
      "",
      " ",
      "\t\n\r ",
      "the The THE unaffable un affable",
      "caf\u00e9 cafe\u0301 CAF\u00c9 \u00c9 e\u0301 \u00e9\u0301 \u1eaf \u01d6",
      "\u65e5\u672c\u8a9ex\u65e5 \U00020000a \uf900 \u3042\u3044 \uac00 \ud55c\ud55c \u3131",
      "\U0001F600\U0001F600 x\U0001F468\u200d\U0001F469\u200d\U0001F467 \U0001F1E9\U0001F1EA \u2764\ufe0f",
      "a\x01"
      "b\x7f"
      "c\x1f d\u0085x \u00ad\u200b\u200e\ufeffx \ufffdx \ue000x \u0378x",
      std::string("a\0b the", 7),
      "a\tb\nc\rd\ve\ff\u00a0g\u1680h\u2003i\u2028j\u2029k\u202fl\u205fm\u3000n",
      "a\x1c"
      "b\x1d"
      "c\x1e"
      "d",
      std::string(100, 'a') + " " + std::string(101, 'a') + " " + std::string(100, 'x') + "a",
      [] {
        std::string text;
        for (int i = 0; i < 100; i++) text += "\u00e9";
        return text + " " + text + "\u00e9";
      }(),
      "...!!!?,.$^``'' a.b,c $1.23 --- \u2014\u2026\u00ab\u00bb\u201c\u201d \u3001\u3002 \u0964 \u00bf\u00a1",
      "[CLS] the [SEP] a[MASK]b [PAD][UNK] [cls] [CLS [ CLS] [[CLS]] [CLS][CLS]a",
      "\u0130 I \u0131 i \u0130\u0130 \u01c5 \u1e9e \u00df \ufb01 \u2126 \u212a \u212b \u03a3 \u039f\u0394\u039f\u03a3 \u03c2 "
      "\u039f\u03a3\u200b \u1f88",
      "\u0301a \u0301 a\u0301\u0327\u0301 \u0915\u094d\u0937 \u0928\u092e\u0938\u094d\u0924\u0947 \u0627\u0644\u0633\u064e\u0651 "
      "\u05e9\u05c1",
      "\u0345\u0308 \u1ffc \u0f71\u0f72 \u0344 \u2adc \U0001D15E \u0958 \u037e \u1fef \u0387",
      "word wordpiece word-piece word\u2010piece wordx piece",
      every_ascii,
      every_latin,
      "a a a a a a a a a a a a a a a a a a a a a a a a a",
      "a a a a a a a",
  };
}

json rows_of(const at::Tensor& tensor) {
  json rows = json::array();
  for (int64_t i = 0; i < tensor.size(0); i++)
    rows.push_back(std::vector<int64_t>(tensor[i].data_ptr<int64_t>(), tensor[i].data_ptr<int64_t>() + tensor.size(1)));
  return rows;
}

json rows_of(const EncodedTexts& texts) {
  return {rows_of(texts.tokens), rows_of(texts.types), rows_of(texts.mask)};
}

/// Nearly every character that a tokenizer can make of the texts is a piece, so that a lost or changed character is noticed.
std::vector<std::string> vocabulary_of(const std::vector<std::string>& texts) {
  std::set<std::string> pieces = {"the",       "The",  "un",      "##aff", "##able", "cafe", "caf\u00e9",
                                  "Caf\u00e9", "word", "##piece", "cls",   "##aaaa", "xx"};
  for (const auto& text : texts) {
    auto all = characters_of(text);
    all += in_lower_case(all);
    all += normalized(all, NormalForm::Composed) + normalized(all, NormalForm::Decomposed);
    for (const auto character : all) {
      if (character == U'\n' || character == U'\r' || character == U'\U0001F1EA') continue;  // lines of a file, and one that is unknown
      const auto piece = to_utf8({&character, 1});
      pieces.insert({piece, "##" + piece});
    }
  }
  std::vector<std::string> vocabulary = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
  vocabulary.insert(vocabulary.end(), pieces.begin(), pieces.end());
  return vocabulary;
}

void expect_same_tokens(const WordPiece& tokenizer, const std::vector<std::string>& texts, const json& expected) {
  for (size_t i = 0; i < texts.size(); i++) EXPECT_EQ(json(tokenizer.tokenize(texts[i])), expected["tokens"][i]) << i << ": " << texts[i];
  EXPECT_EQ(rows_of(tokenizer.encode(texts)), expected["single"]);
  EXPECT_EQ(rows_of(tokenizer.encode(texts, {.max_length = 5, .padding = EncodeOptions::Padding::ToMaxLength})), expected["single_short"]);
  std::vector<std::pair<std::string, std::string>> pairs;
  for (size_t i = 0; i < texts.size(); i++) pairs.emplace_back(texts[i], texts[(i + 1) % texts.size()]);
  for (size_t i = 0; const int64_t length : {3, 4, 9, 16, 512})
    EXPECT_EQ(rows_of(tokenizer.encode(pairs, {.max_length = length})), expected["pairs"][i++]) << length;
}

TEST(WordPieceTransformers, TokensAreTheSame) {
  const std::vector<WordPieceOptions> variants = {
      {},
      {.lower_case = false},
      {.strip_accents = false},
      {.lower_case = false, .strip_accents = true, .split_ideographs = false},
  };
  const Folder folder;
  const auto texts = hard_texts();
  std::vector<std::string> folders;
  for (size_t i = 0; i < variants.size(); i++) {
    folders.push_back(folder / std::to_string(i));
    WordPiece(vocabulary_of(texts), variants[i]).write(folders[i]);
    testing::write_file(folders[i] + "/texts.json", json(texts).dump());
  }
  const auto made = run_script(folders);
  if (made.status == testing::kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(made.status, 0) << made.output;
  for (const auto& each : folders) expect_same_tokens(WordPiece::read(each), texts, json::parse(testing::read_file(each + "/tokens.json")));
}

}  // namespace
}  // namespace tessera::data::wordpiece_transformers_test
