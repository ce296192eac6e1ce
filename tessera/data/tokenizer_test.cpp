// Tokenizers refuse what they can't read by its name, and survive their own files.
#include "tessera/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/error.h"
#include "tessera/data/byte_pairs.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/data/unicode.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::tokenizer_test {
namespace {

using data::BpeVocabulary;
using data::Ends;
using data::Tokenizer;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// All bytes, and some words.
BpeVocabulary vocabulary(const std::string& pre = "gpt2") {
  BpeVocabulary result{.tokens = {}, .merges = {"t h", "th e", "\u0120 the", "1 2"}, .added = {}, .special = {}, .pre = pre};
  for (int byte = 0; byte < 256; byte++) result.tokens.push_back(data::letter_of(byte));
  for (const auto* word : {"th", "the", "\u0120the", "12", "<s>", "</s>"}) result.tokens.emplace_back(word);
  result.added = result.special = {260, 261};
  return result;
}

json json_of(const Tokenizer& tokenizer) {
  const Folder folder;
  tokenizer.write(folder.path());
  return json::parse(read_file(folder / "tokenizer.json"));
}

TEST(Tokenizer, MergesWhatWasLearnedFirst) {
  const Tokenizer tokenizer(vocabulary());
  EXPECT_THAT(tokenizer.encode("the the12"), ElementsAre(257, 258, 259));
  EXPECT_THAT(tokenizer.encode("<s>the</s>"), ElementsAre(260, 257, 261));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("<s>the 12\u00e9</s>")), "the 12\u00e9");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("<s>the"), Tokenizer::Special::Shown), "<s>the");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("\xff")), "\uFFFD");
  EXPECT_EQ(tokenizer.size(), 262);
  EXPECT_EQ(tokenizer.find("the"), 257);
  EXPECT_EQ(tokenizer.find("them"), std::nullopt);
  EXPECT_THAT(message_of<UsageError>([&] { tokenizer.decode(std::vector{262}); }),
              HasSubstr("there is no token 262; this tokenizer has 262"));
  EXPECT_THAT(Tokenizer(vocabulary("smollm")).encode("12"), ElementsAre(49, 50));
}

TEST(Tokenizer, LeavesOutBytesWithoutAToken) {
  auto parts = vocabulary();
  parts.tokens['h'] = "-";
  parts.merges = {"t e"};
  parts.tokens[256] = "te";
  EXPECT_THAT(Tokenizer(parts).encode("the"), ElementsAre(256));
}

TEST(Tokenizer, AddsTheEndsOfTexts) {
  auto with_bos = vocabulary();
  with_bos.bos = 260;
  with_bos.add_bos = true;
  const Tokenizer tokenizer(with_bos);
  EXPECT_THAT(tokenizer.encode("the"), ElementsAre(260, 257));
  EXPECT_THAT(tokenizer.encode("the", Ends::Bare), ElementsAre(257));
}

TEST(Tokenizer, EndsMustBeTokens) {
  auto parts = vocabulary();
  parts.add_bos = true;
  EXPECT_THAT(message_of<ConfigError>([&] { Tokenizer{parts}; }), HasSubstr("does not say which token that is"));
  parts.add_bos = false;
  parts.add_eos = true;
  parts.eos = 261;
  EXPECT_THAT(Tokenizer(parts).encode("the"), ElementsAre(257, 261));
  EXPECT_TRUE(Tokenizer(parts).vocabulary().add_eos);
}

TEST(Tokenizer, LooksForAddedTokensInTheirNormalForm) {
  auto changed = json_of(Tokenizer(vocabulary("qwen2")));
  changed["added_tokens"].push_back(
      {{"id", 262}, {"content", "e\u0301x"}, {"special", false}, {"normalized", true}, {"lstrip", false}, {"rstrip", false}});
  const Folder folder;
  write_file(folder / "tokenizer.json", changed.dump());
  const auto tokenizer = Tokenizer::read(folder.path());
  EXPECT_THAT(tokenizer.encode("e\u0301x"), ElementsAre(262));
  EXPECT_THAT(tokenizer.encode("\u00e9x"), ElementsAre(262));
}

TEST(Tokenizer, HasNoNameForWhatANameDoesNotSay) {
  const auto refusal = [&](const char* pre, const char* part, const json& value) {
    auto changed = json_of(Tokenizer(vocabulary(pre)));
    changed[json::json_pointer(part)] = value;
    const Folder folder;
    write_file(folder / "tokenizer.json", changed.dump());
    return message_of<ConfigError>([&] { Tokenizer::read(folder.path()).vocabulary(); });
  };
  EXPECT_THAT(refusal("gpt2", "/normalizer", {{"type", "NFC"}}), HasSubstr("the normalizer has the normal form NFC, which has no place"));
  EXPECT_THAT(refusal("qwen2", "/normalizer", nullptr), HasSubstr("the normalizer has no normal form"));
  EXPECT_THAT(refusal("qwen2", "/added_tokens/0/normalized", true), HasSubstr("the added token '<s>' has normalized"));
  for (const std::string flag : {"lstrip", "rstrip", "single_word"})
    EXPECT_THAT(refusal("gpt2", ("/added_tokens/0/" + flag).c_str(), true), HasSubstr("the added token '<s>' has " + flag));
  // Only ignore_merges encodes the word "12" as a token that no merges make.
  EXPECT_THAT(refusal("llama3", "/model",
                      [] {
                        auto model = json_of(Tokenizer(vocabulary("llama3")))["model"];
                        model["ignore_merges"] = false;
                        model["merges"] = {"t h", "th e", "\u0120 the"};
                        return model;
                      }()),
              HasSubstr("ignore_merges is false, and '12' is a token by that alone"));
  auto same = json_of(Tokenizer(vocabulary("llama3")));
  same["model"]["ignore_merges"] = false;  // where all words come about by merges, it makes no difference
  const Folder folder;
  write_file(folder / "tokenizer.json", same.dump());
  EXPECT_EQ(Tokenizer::read(folder.path()).vocabulary().pre, "llama3");
}

TEST(Tokenizer, MayHaveManyWords) {
  auto parts = vocabulary("llama3");
  for (int i = 0; i < 150'000; i++) parts.tokens.push_back("word" + std::to_string(i));
  const Folder folder;
  Tokenizer(parts).write(folder.path());
  const auto tokenizer = Tokenizer::read(folder.path());
  EXPECT_EQ(tokenizer.size(), 150'262);
  EXPECT_THAT(tokenizer.encode("word149999", Ends::Bare), Not(IsEmpty()));
  EXPECT_EQ(tokenizer.find("word149999"), 150'261);
}

TEST(Tokenizer, SurvivesItsFile) {
  for (const auto* pre : {"gpt2", "llama3", "qwen2", "smollm", "tekken"}) {
    auto parts = vocabulary(pre);
    parts.bos = 260;
    parts.add_bos = true;
    const Tokenizer tokenizer(parts);
    const Folder folder;
    tokenizer.write(folder.path());
    const auto again = Tokenizer::read(folder.path());
    for (const auto* text : {"the the 1212 <s>e\u0301</s>  x\n", "", " The's"}) {
      EXPECT_EQ(again.encode(text), tokenizer.encode(text)) << pre;
      EXPECT_EQ(again.decode(again.encode(text)), tokenizer.decode(tokenizer.encode(text))) << pre;
    }
    EXPECT_EQ(again.vocabulary().tokens, parts.tokens);
    EXPECT_EQ(again.vocabulary().merges, parts.merges);
    EXPECT_EQ(again.vocabulary().pre, pre);
    EXPECT_EQ(again.vocabulary().bos, 260);
    const Folder copy;
    again.write(copy.path());
    EXPECT_EQ(read_file(copy / "tokenizer.json"), read_file(folder / "tokenizer.json"));
  }
}

TEST(Tokenizer, ReadsModelsOfSentencePiece) {
  // Fields of sentencepiece_model.proto: pieces with text, score and type; the kind BPE; no added space, no merged spaces.
  std::string model;
  const auto add_piece = [&](const std::string& text, float score, char type) {
    std::string piece = "\x0a" + std::string(1, static_cast<char>(text.size())) + text + "\x15" + std::string(4, '\0') + "\x18" + type;
    std::memcpy(piece.data() + piece.size() - 6, &score, sizeof score);
    model += "\x0a" + std::string(1, static_cast<char>(piece.size())) + piece;
  };
  add_piece("<unk>", 0, 2);
  add_piece("<s>", 0, 3);
  add_piece("</s>", 0, 3);
  for (const auto* text : {"ab", "bc", "a", "b", "c", "\u2581"}) add_piece(text, -static_cast<float>(model.size()), 1);
  model += std::string("\x12\x02\x18\x02\x1a\x04\x18\x00\x20\x00", 10);
  const Folder folder;
  write_file(folder / "tokenizer.model", model);
  write_file(folder / "added_tokens.json", R"({"<turn>": 9})");
  EXPECT_THAT(Tokenizer::read(folder.path()).encode("abc xy<turn>bcb"), ElementsAre(1, 3, 7, 8, 0, 9, 4, 6));
  write_file(folder / "tokenizer_config.json",
             R"({"add_bos_token": false, "added_tokens_decoder": {"10": {"content": "<end>", "rstrip": true}}})");
  const auto tokenizer = Tokenizer::read(folder / "tokenizer.model");
  EXPECT_THAT(tokenizer.encode("bc<end>  a"), ElementsAre(4, 10, 5));
  EXPECT_EQ(tokenizer.decode(std::vector{3, 8, 10, 7}), "ab c");
  write_file(folder / "tokenizer_config.json", R"({"tokenizer_class": "XLMRobertaTokenizerFast"})");
  EXPECT_THAT(message_of<ConfigError>([&] { Tokenizer::read(folder.path()); }), HasSubstr("are read here, not XLMRobertaTokenizerFast"));
  write_file(folder / "tokenizer_config.json", R"({"added_tokens_decoder": {"x": {"content": "y"}}})");
  EXPECT_THAT(message_of<ConfigError>([&] { Tokenizer::read(folder.path()); }), HasSubstr("-1 can't be the id of a token"));
  for (const size_t size : {1, 5, 8, 20, 30, 100}) {
    write_file(folder / "tokenizer.model", model.substr(0, model.size() - size));
    EXPECT_THAT(message_of<IoError>([&] { Tokenizer::read(folder.path()); }), HasSubstr("tokenizer.model is damaged: it is not a whole")) << size;
  }
}

TEST(Tokenizer, NamesThePartThatItCantRead) {
  const auto whole = json_of(Tokenizer(vocabulary()));
  const Folder folder;
  const auto refusal = [&](const char* part, const json& value) {
    auto changed = whole;
    changed[json::json_pointer(part)] = value;
    write_file(folder / "tokenizer.json", changed.dump());
    return message_of<ConfigError>([&] { Tokenizer::read(folder.path()); });
  };
  const std::tuple<const char*, json, const char*> wrong[] = {
      {"/normalizer", {{"type", "BertNormalizer"}}, "tokenizer.json: normalizer: 'BertNormalizer' is not read here"},
      {"/normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "AAAA"}}, "normalizer: precompiled_charsmap is damaged: it holds 3"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "pre_tokenizer: 'BertPreTokenizer' is not read here"},
      {"/pre_tokenizer", {{"type", "Digits"}}, "decoder: 'ByteLevel' is not read here"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Contiguous", "pre_tokenizer: \"Contiguous\" is not read here"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "(", "tokenizer.json: pre_tokenizer: the regular expression '(': missing closing"},
      {"/model/type", "WordPiece", "model: 'WordPiece' is not read here"},
      {"/model/end_of_word_suffix", "</w>", "model: end_of_word_suffix \"</w>\" is not read here"},
      {"/model/byte_fallback", true, "model: byte_fallback true is not read here"},
      {"/model/merges/0", "q z", "the merge 'q z' has tokens that are not in the vocabulary"},
      {"/model/vocab", {{"a", 0}}, "the merge 't h' has tokens that are not in the vocabulary"},
      {"/added_tokens/0/id", 4294967297, "added_tokens: 4294967297 can't be the id of a token"},
      {"/post_processor",
       json::parse(R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {"x": {"ids": [999]}}})"),
       "a text would begin or end with token 999, which is not there"},
      {"/post_processor", {{"type", "BertProcessing"}}, "post_processor: 'BertProcessing' is not read here"},
      {"/decoder", {{"type", "WordPiece"}}, "decoder: 'WordPiece' is not read here"},
  };
  for (const auto& [part, value, why] : wrong) EXPECT_THAT(refusal(part, value), HasSubstr(why)) << part;
  for (const auto* text :
       {"[", R"({"model": 3})", R"({"model": {"vocab": {"a": "b"}, "merges": []}})", R"({"pre_tokenizer": {"type": "Sequence"}})"}) {
    write_file(folder / "tokenizer.json", text);
    EXPECT_THAT(message_of<Error>([&] { Tokenizer::read(folder.path()); }), HasSubstr("tokenizer.json")) << text;
  }
  EXPECT_THAT(message_of<IoError>([&] { Tokenizer::read(folder / "nothing"); }), HasSubstr("nothing"));
  const Folder others;
  write_file(others / "vocab.json", "{}");
  write_file(others / "merges.txt", "");
  EXPECT_THAT(message_of<ConfigError>([&] { Tokenizer::read(others.path()); }),
              HasSubstr("has no tokenizer.json, but vocab.json and merges"));
  write_file(others / "tokenizer.model", "");
  EXPECT_THAT(message_of<IoError>([&] { Tokenizer::read(others.path()); }), HasSubstr("tokenizer.model is damaged: it has no pieces"));
  EXPECT_THAT(message_of<ConfigError>([&] { Tokenizer(vocabulary("bert")); }),
              HasSubstr("there is no pre-tokenizer 'bert' here; those that are: gpt2, llama3, qwen2, smollm, tekken"));
}

/// The definition of byte pair encoding: merges the pair with the lowest rank, again and again.
std::vector<int32_t> merged_slowly(const std::string& word, const std::vector<data::BytePairs::Merge>& merges) {
  std::vector<int32_t> parts;
  for (const char byte : word) parts.push_back(static_cast<uint8_t>(byte));
  for (;;) {
    size_t best = merges.size(), at = 0;
    for (size_t i = 0; i + 1 < parts.size(); i++) {
      for (size_t rank = 0; rank < best; rank++) {
        if (merges[rank].left == parts[i] && merges[rank].right == parts[i + 1]) best = rank, at = i;
      }
    }
    if (best == merges.size()) return parts;
    parts[at] = merges[best].merged;
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(BytePairs, MergeAsTheyAreDefined) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; round++) {
    const int letters = 2 + round % 5;
    std::vector<data::BytePairs::Merge> merges;
    std::vector<int32_t> known;
    for (int letter = 0; letter < letters; letter++) known.push_back('a' + letter);
    std::set<std::pair<int32_t, int32_t>> pairs;
    for (int32_t merged = 256; merged < 286; merged++) {
      const auto left = known[random() % known.size()], right = known[random() % known.size()];
      if (!pairs.emplace(left, right).second) continue;
      merges.push_back({left, right, merged, static_cast<uint32_t>(merges.size())});
      known.push_back(merged);
    }
    std::array<int32_t, 256> of_bytes{};
    for (int byte = 0; byte < 256; byte++) of_bytes[static_cast<size_t>(byte)] = byte;
    const data::BytePairs byte_pairs(of_bytes, merges);
    for (const size_t length : {1, 2, 7, 48, 49, 200}) {  // by merge_short() and by merge_long()
      std::string word;
      while (word.size() < length) word += static_cast<char>('a' + random() % static_cast<unsigned>(letters));
      std::vector<int32_t> tokens = {-1};
      byte_pairs.encode(word, tokens);
      auto expected = merged_slowly(word, merges);
      expected.insert(expected.begin(), -1);
      EXPECT_EQ(tokens, expected) << word;
    }
  }
}

TEST(KnownWords, HaveTheirOwnTokensOrNone) {
  data::KnownWords words;
  const auto known = [&](const std::string& word) {
    std::vector<int32_t> tokens = {-1};
    return words.find(word, tokens) ? std::optional(tokens) : std::nullopt;
  };
  const std::vector<int32_t> twenty(20, 7), more(21, 7);
  words.add(std::string(46, 'x'), twenty);
  words.add(std::string(47, 'x'), twenty);
  words.add("y", more);
  EXPECT_EQ(known(std::string(46, 'x')).value().size(), 21);
  EXPECT_FALSE(known(std::string(47, 'x')));
  EXPECT_FALSE(known("y"));
  words.add("z", {});
  EXPECT_THAT(known("z").value(), ElementsAre(-1));
  int found = 0;
  for (int32_t i = 0; i < 100'000; i++) words.add(std::to_string(i), std::vector{i, i + 1});  // more than there are places
  for (int32_t i = 0; i < 100'000; i++) {
    const auto tokens = known(std::to_string(i));
    if (!tokens) continue;
    found++;
    ASSERT_THAT(*tokens, ElementsAre(-1, i, i + 1));
  }
  EXPECT_GT(found, 20'000);
}

TEST(Unicode, NormalFormsForTokensLeaveWhatIsNewerThanUnicode9) {
  using data::NormalForm;
  EXPECT_EQ(data::normalized_for_tokens(U"e\u0301e\u0323\u0301", NormalForm::Composed), U"\u00e9\u1eb9\u0301");
  EXPECT_EQ(data::normalized_for_tokens(U"e\u1abf\u0301", NormalForm::Composed), U"e\u1abf\u0301");
  EXPECT_EQ(data::normalized_for_tokens(U"\u0301\u1abf", NormalForm::Decomposed), U"\u0301\u1abf");
  EXPECT_EQ(data::normalized_for_tokens(U"\U00011938\u00e9", NormalForm::Decomposed), U"\U00011938e\u0301");
}

TEST(Unicode, ReplacesWhatIsNoCharacter) {
  const std::string_view bad = "\uFFFD";
  const auto times = [&](int count) {
    std::string all;
    for (int i = 0; i < count; i++) all += bad;
    return all;
  };
  EXPECT_EQ(data::with_replacements("a\u00e9\U0001F600"), "a\u00e9\U0001F600");
  EXPECT_EQ(data::with_replacements("\xff\xc3"), times(2));
  EXPECT_EQ(data::with_replacements("\xf0\x9f\x98"), times(1));                                // one character that is cut off
  EXPECT_EQ(data::with_replacements("\xf0\x9f\x98x\xed\xa0\x80"), times(1) + "x" + times(3));  // half of a pair of UTF-16
  EXPECT_EQ(data::with_replacements("\xc0\xaf\xf4\x90\x80\x80"), times(6));
}

}  // namespace
}  // namespace tessera::testing::tokenizer_test
