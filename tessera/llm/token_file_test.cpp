// Lines of JSON become files of tokens, on any number of threads and in several calls, and these files become rows for training.
#include "tessera/llm/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/llm/chat.h"
#include "tessera/llm/packing.h"
#include "tessera/llm/tokenize.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::token_file_test {
namespace {

using llm::only_read;
using llm::TokenizeOptions;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kBegin = 256, kEnd = 257, kTurn = 258, kTurnEnd = 259;

/// A token for each byte, and some marks.
data::Tokenizer tokenizer() {
  data::BpeVocabulary vocabulary{.tokens = {}, .merges = {}, .added = {}, .special = {}, .pre = "gpt2", .bos = kBegin, .add_bos = true};
  for (int byte = 0; byte < 256; byte++) vocabulary.tokens.push_back(data::letter_of(byte));
  for (const auto* mark : {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}) vocabulary.tokens.emplace_back(mark);
  vocabulary.added = vocabulary.special = {kBegin, kEnd, kTurn, kTurnEnd};
  return data::Tokenizer(vocabulary);
}

std::shared_ptr<const llm::ChatTemplate> named(const char* name) {
  return std::make_shared<llm::ChatTemplate>(llm::ChatTemplate::named(name));
}

std::string text_of(std::span<const int32_t> stored) {
  std::vector<int32_t> tokens;
  for (const auto token : stored) tokens.push_back(llm::token_of(token));
  return tokenizer().decode(tokens, data::Tokenizer::Special::Shown);
}

TEST(Lines, BecomeTokensOfWhichSomeAreOnlyRead) {
  const auto tokens = [&](const std::string& line, TokenizeOptions options = {.end = kEnd}) {
    return llm::tokens_of_line(line, tokenizer(), options).at(0);
  };
  EXPECT_THAT(tokens(R"({"text": "ab"})"), ElementsAre(kBegin, 'a', 'b', kEnd));
  EXPECT_THAT(tokens(R"({"text": "a"})", {}), ElementsAre(kBegin, 'a'));
  EXPECT_THAT(tokens(R"({"prompt": "a", "completion": "b"})"), ElementsAre(only_read(kBegin), only_read('a'), 'b', kEnd));
  const auto chat = tokens(R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})",
                           {.chat = named("chatml"), .end = kTurnEnd});
  EXPECT_EQ(text_of(chat), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n");
  std::string learned;
  for (const auto token : chat) {
    if (!llm::is_only_read(token)) learned += tokenizer().decode(std::vector{token}, data::Tokenizer::Special::Shown);
  }
  EXPECT_EQ(learned, "yo<|im_end|>");
  const std::pair<const char*, const char*> wrong[] = {
      {"[1]", "it is JSON, but not an object, such as {\"text\": \"...\"}"},
      {R"({"text": a})", "it is not JSON from byte 10 on"},
      {R"({"texts": "a"})", "it has texts, but neither text, nor prompt and completion, nor messages"},
      {R"({"text": 1})", "text is not a text"},
      {R"({"conversations": [{"from": "narrator", "value": "a"}]})", "message 1 is from 'narrator'"},
      {R"({"instruction": "a", "input": "", "output": 1})", "output is not a text"},
      {R"({"prompt": "q", "completion": 1})", "completion is not a text, and not a list of messages"},
      {R"({"prompt": "q", "completion": "a", "label": false})", "its label says no"},
      {R"({"instruction": "q", "chosen": "a", "rejected": ["b"]})", "one of chosen and rejected is a text"},
      {R"({"chosen": ["a"], "rejected": ["b"]})", "message 1 is not an object with role and content"},
      {R"({"messages": "a"})", "messages is not a list of messages"},
      {R"({"messages": null, "text": null})", "it has messages (null), text (null), but neither text"},
      {R"({"conversations": [{"from": "function_call", "value": "g"}]})", "message 1: its function_call is not JSON with a name"},
      {R"({"chosen": "a", "rejected": "b"})", "no prompt, and they do not begin with the same words"},
      {R"({"messages": []})", "it needs a chat template"}};
  for (const auto& [line, why] : wrong) EXPECT_THAT(message_of<UsageError>([&] { tokens(line); }), HasSubstr(why)) << line;
  const TokenizeOptions with_chat{.chat = named("chatml")};
  EXPECT_THAT(message_of<UsageError>([&] { tokens(R"({"messages": [{"role": "robot", "content": ""}]})", with_chat); }),
              HasSubstr("the role 'robot'"));
  const std::pair<const char*, const char*> wrong_messages[] = {
      {R"({"content": "a"})", "message 1 has no role"},
      {R"({"role": "user"})", "message 1 has no content"},
      {R"({"role": "user", "content": [{"type": "image"}]})", "message 1 has a part of its content that is not a text"},
      {R"({"role": "assistant", "content": null, "tool_calls": [{}]})",
       "message 1 has tool calls, which the chat template chatml does not write"},
      {R"({"role": "asistant", "content": "a"})", "message 1 has the role 'asistant', which the chat template chatml does not name"},
      {R"({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "x=1"}]})",
       "message 1 has a tool call whose arguments are not JSON"},
      {R"({"role": "assistant", "content": "a", "weight": 0.5})", "message 1 has a weight that is neither 0 nor 1"},
      {R"({"role": "assistant", "content": "a", "weight": 0})", "there is nothing to learn: a conversation needs"},
      {R"({"role": "assistant", "content": null})", "message 1 has a content that is null, and not text"}};
  for (const auto& [message, why] : wrong_messages)
    EXPECT_THAT(message_of<UsageError>([&] { tokens(std::string(R"({"messages": [)") + message + "]}", with_chat); }), HasSubstr(why));
  EXPECT_THAT(message_of<UsageError>([&] { tokens(R"({"messages": [{"role": "user", "content": ""}]})", with_chat); }),
              HasSubstr("there is nothing to learn"));
}

/// A prompt ends inside of tokens, as byte pair encoding makes them.
TEST(Lines, LearnNothingOfAPrompt) {
  auto vocabulary = tokenizer().vocabulary();
  const int32_t first = 260;
  for (const auto* merge : {"y z", "a b", "c d", "cd e"}) {
    std::string merged = merge;
    std::erase(merged, ' ');
    vocabulary.tokens.push_back(merged);
    vocabulary.merges.emplace_back(merge);
  }
  const int32_t ab = first + 1, cd = first + 2, cde = first + 3;
  const data::Tokenizer merging(vocabulary);
  const auto tokens = [&](const std::string& prompt, const std::string& completion) {
    const auto line = nlohmann::json{{"prompt", prompt}, {"completion", completion}}.dump();
    return llm::tokens_of_line(line, merging, {}).at(0);
  };
  const auto begin = only_read(kBegin), x = only_read('x');
  EXPECT_THAT(tokens("xa", "bx"), ElementsAre(begin, x, only_read(ab), 'x'));
  EXPECT_THAT(tokens("xc", "dx"), ElementsAre(begin, x, only_read(cd), 'x'));
  EXPECT_THAT(tokens("xcd", "ex"), ElementsAre(begin, x, only_read(cde), 'x'));
  EXPECT_THAT(tokens("xa", "x"), ElementsAre(begin, x, only_read('a'), 'x'));
  // SentencePiece has a blank and the letter after it in one token.
  const data::Tokenizer pieces({.tokens = {"<unk>", "<s>", "</s>", "\u2581", "a", "q", "\u2581a", "\u2581q"},
                                .merges = {},
                                .added = {},
                                .special = {},
                                .pre = {},
                                .unknown = 0,
                                .model = "llama",
                                .scores = {0, 0, 0, -5, -4, -3, -2, -1},
                                .spaces = {.added = true}});
  EXPECT_THAT(llm::tokens_of_line(R"({"prompt": "q ", "completion": "aq"})", pieces, {}).at(0), ElementsAre(only_read(7), only_read(6), 5));
  // transformers learns such a token where a template has it in its {% generation %}.
  const Folder folder;
  write_file(folder / "x.jinja", "{% for m in messages %}x{% generation %}a{{ m.content }}{% endgeneration %}{% endfor %}");
  const auto chat = std::make_shared<llm::ChatTemplate>(llm::ChatTemplate::of(folder.path(), folder / "x.jinja"));
  const auto line = R"({"messages": [{"role": "assistant", "content": "b"}]})";
  EXPECT_THAT(llm::tokens_of_line(line, merging, {.chat = chat}).at(0), ElementsAre(x, ab));
}

TEST(Lines, HoldTheUsualFormsOfChats) {
  const auto learned = [&](const std::string& line, const char* name = "chatml", size_t document = 0) {
    std::string text;
    const auto documents = llm::tokens_of_line(line, tokenizer(), {.chat = named(name), .end = kEnd});
    for (const auto token : documents.at(document)) {
      const auto letter = tokenizer().decode(std::vector{llm::token_of(token)}, data::Tokenizer::Special::Shown);
      text += llm::is_only_read(token) ? letter : "[" + letter + "]";
    }
    return text;
  };
  const std::string start = "<|im_start|>", end = "<|im_end|>\n";
  const auto whole = start + "user\nq" + end + start + "assistant\n[a][<|im_end|>]\n";
  for (const auto* line :
       {R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})",
        R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "assistant", "content": "a"}]})",
        R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})",
        R"({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})",
        R"({"instruction": "q", "input": "", "output": "a"})",
        R"({"messages": [{"from": null, "role": "user", "content": "q"}, {"from": "gpt", "value": null, "content": "a"}], "system": ""})",
        R"({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "text": "t"})",
        R"({"messages": null, "prompt": [{"role": "user", "content": "q"}], "completion": "a"})",
        R"({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]})"})
    EXPECT_EQ(learned(line), whole) << line;
  EXPECT_EQ(learned(R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"})"),
            start + "system\ns" + end + whole);
  EXPECT_EQ(learned(R"({"system": "s", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})"),
            start + "system\ns" + end + whole);
  EXPECT_THAT(learned(R"({"instruction": "q", "input": "i", "output": "a"})"), HasSubstr("user\nq\ni<|im_end|>"));
  EXPECT_THAT(learned(R"({"instruction": "q", "input": "i", "output": "a"})", "alpaca"),
              AllOf(HasSubstr("further context."), HasSubstr("### Instruction:\nq\n\n### Input:\ni\n\n### Response:\n[a][</s>]")));
  EXPECT_EQ(learned(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "weight": 0},
                                     {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]})"),
            start + "user\nq" + end + start + "assistant\nb" + end + whole);
  EXPECT_THAT(message_of<UsageError>([&] {
                learned(R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "weight": 0}]})", "alpaca");
              }),
              HasSubstr("there is nothing to learn"));
  // Only the completion is learned, and of a pair what comes after the prompt.
  const std::string turns = R"({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"})";
  EXPECT_EQ(learned(R"({"prompt": [)" + turns + R"(], "completion": [{"role": "assistant", "content": "b"}]})"),
            start + "user\nq" + end + start + "assistant\na" + end + start + "user\nr" + end + start + "assistant\n[b][<|im_end|>]\n");
  for (const auto& pair : {R"({"prompt": "p", "chosen": "c", "rejected": "d"})", R"({"prompt": "", "chosen": "c", "rejected": "d"})"})
    EXPECT_THAT(learned(pair, "chatml", 1), HasSubstr("[d][</s>]"));
  for (const auto* pair : {R"({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "c"},
                               "rejected": {"from": "gpt", "value": "a"}})",
                           R"({"instruction": "q", "chosen": [{"role": "assistant", "content": "c"}],
                               "rejected": [{"role": "assistant", "content": "a"}]})",
                           R"({"chosen": [{"content": "q", "role": "user"}, {"role": "assistant", "content": "c"}],
                               "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})",
                           R"({"instruction": "q", "prompt": null, "chosen": "c", "rejected": "a"})"})
    EXPECT_EQ(learned(pair, "chatml", 1), whole) << pair;
  const auto words = R"({"chosen": "q r a b", "rejected": "q r ac"})";
  EXPECT_THAT(learned(words, "chatml", 0), HasSubstr("q r [a][ ][b]"));
  EXPECT_THAT(learned(words, "chatml", 1), HasSubstr("q r [a][c]"));
  const auto implicit = R"({"chosen": [)" + turns + R"(, {"role": "assistant", "content": "c"}], "rejected": [)" + turns +
                        R"(, {"role": "assistant", "content": "d"}]})";
  EXPECT_THAT(learned(implicit, "chatml", 0), AllOf(HasSubstr("[c][<|im_end|>]"), HasSubstr("assistant\na<|im_end|>")));
  EXPECT_THAT(learned(implicit, "chatml", 1), HasSubstr("[d][<|im_end|>]"));
  for (const auto* prompt : {"", R"("prompt": "q", )"}) {
    const auto unlike = std::string("{") + prompt +
                        R"("chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                           "rejected": [{"role": "user", "content": "other"}, {"role": "assistant", "content": "a"}]})";
    EXPECT_THAT(message_of<UsageError>([&] { learned(unlike); }),
                HasSubstr("chosen and rejected differ in message 1, which is not an answer"));
  }
  auto other = implicit;
  EXPECT_THAT(message_of<UsageError>([&] { learned(other.insert(1, R"("prompt": "x", )")); }), HasSubstr("its prompt is not among the messages"));
  EXPECT_THAT(learned(other.replace(12, 1, "r")), HasSubstr("[c]"));
}

/// Returns lines of varying lengths, some of them empty, and the last one without a newline.
std::string drawn_lines(int count, size_t longest) {
  std::string lines;
  for (int i = 0; i < count; i++) {
    const auto length = static_cast<size_t>(i * 7919) % longest;
    lines += nlohmann::json{{"text", std::to_string(i) + std::string(length, static_cast<char>('a' + i % 26))}}.dump() +
             (i % 10 == 9 ? "\n\n" : "\n");
  }
  lines.pop_back();
  return lines;
}

TEST(TokenFiles, AreTheSameWithAnyNumberOfThreads) {
  const Folder folder;
  write_file(folder / "a.jsonl", drawn_lines(700, 14'000));  // several parts, with lines that cross their borders
  write_file(folder / "b.jsonl", drawn_lines(3, 10));
  std::string words(5'000'000, 'x');  // a line of two parts
  for (size_t i = 99; i < words.size(); i += 100) words[i] = ' ';
  write_file(folder / "c.jsonl", nlohmann::json{{"text", words}}.dump());
  const std::vector<std::filesystem::path> inputs = {folder / "a.jsonl", folder / "b.jsonl", folder / "c.jsonl"};
  const auto made = llm::tokenize(inputs, folder / "one.tokens", tokenizer(), {.end = kEnd, .threads = 1});
  EXPECT_EQ(made.documents, 704);
  const llm::TokenFile file(folder / "one.tokens");
  EXPECT_EQ(std::ssize(file.tokens()), made.tokens);
  EXPECT_EQ(file.vocabulary(), 260);
  int64_t begin = 0;
  for (int64_t i = 0; i < 703; i++) {
    const auto end = file.ends()[static_cast<size_t>(i)];
    const auto text = text_of(file.tokens().subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
    const auto number = i < 700 ? i : i - 700;
    ASSERT_TRUE(text.starts_with("<s>" + std::to_string(number)) && text.ends_with("</s>")) << i << text.substr(0, 30);
    begin = end;
  }
  llm::tokenize(inputs, folder / "four.tokens", tokenizer(), {.end = kEnd, .threads = 4});
  EXPECT_EQ(read_file(folder / "four.tokens"), read_file(folder / "one.tokens"));

  // Stopped and resumed.
  int calls = 0;
  const TokenizeOptions stops{.end = kEnd, .threads = 1, .progress = [&](uint64_t, uint64_t) { return ++calls < 2; }};
  EXPECT_THAT(message_of<Error>([&] { llm::tokenize(inputs, folder / "late.tokens", tokenizer(), stops); }),
              HasSubstr("resumes from here"));
  EXPECT_FALSE(is_there(folder / "late.tokens"));
  EXPECT_EQ(llm::tokenize(inputs, folder / "late.tokens", tokenizer(), {.end = kEnd, .threads = 2}).found, 2);
  EXPECT_EQ(read_file(folder / "late.tokens"), read_file(folder / "one.tokens"));
  EXPECT_FALSE(is_there(folder / "late.tokens.parts"));
  // Parts that were made with other options are not used.
  calls = 0;
  EXPECT_THAT(message_of<Error>([&] { llm::tokenize(inputs, folder / "late.tokens", tokenizer(), stops); }), HasSubstr("resumes"));
  EXPECT_EQ(llm::tokenize(inputs, folder / "late.tokens", tokenizer(), {}).found, 0);
}

TEST(TokenFiles, LoseNothing) {
  const Folder folder;
  write_file(folder / "a.jsonl", drawn_lines(200, 60'000));
  const std::vector<std::filesystem::path> inputs = {folder / "a.jsonl"};
  EXPECT_THAT(message_of<UsageError>([&] { llm::tokenize(inputs, folder / "a.jsonl", tokenizer()); }),
              HasSubstr("is an input, which the output would replace"));
  write_file(folder / "notes", "mine");
  EXPECT_THAT(message_of<UsageError>([&] { llm::tokenize(inputs, folder / "notes", tokenizer()); }),
              HasSubstr("notes is there already, and is not a file of tokens"));
  EXPECT_EQ(read_file(folder / "notes"), "mine");
  EXPECT_THAT(message_of<ConfigError>([&] { llm::tokenize(inputs, folder / "x", tokenizer(), {.chat = named("llama3")}); }),
              HasSubstr("the tokenizer has no token <|begin_of_text|>"));
  // Parts that were made with another tokenizer are not used.
  int calls = 0;
  const TokenizeOptions stops{.threads = 1, .progress = [&](uint64_t, uint64_t) { return ++calls < 2; }};
  EXPECT_THAT(message_of<Error>([&] { llm::tokenize(inputs, folder / "y", tokenizer(), stops); }), HasSubstr("resumes from here"));
  data::BpeVocabulary other = tokenizer().vocabulary();
  other.pre = "smollm";
  EXPECT_EQ(llm::tokenize(inputs, folder / "y", data::Tokenizer(other)).found, 0);
}

TEST(TokenFiles, HaveArraysAndPairs) {
  const Folder folder;
  const auto made = [&](const char* name, const std::string& text) {
    write_file(folder / name, text);
    const std::vector<std::filesystem::path> inputs = {folder / name};
    llm::tokenize(inputs, folder / "t", tokenizer());
    return llm::TokenFile(folder / "t");
  };
  const auto array = made("a.json", "[\n {\"text\": \"a]\\\"\"},\n {\"text\": \"b\"}\n]");
  EXPECT_EQ(text_of(array.tokens()), "<s>a]\"<s>b");
  EXPECT_FALSE(array.has_pairs());
  EXPECT_THAT(message_of<IoError>([&] { made("b.json", "[{\"text\": \"a\"},\n{\"texts\": 1}]"); }), HasSubstr("b.json:2: it has texts"));
  const std::string pair = R"({"prompt": "p", "chosen": "c", "rejected": "d"})", single = R"({"text": "a"})";
  const auto pairs = made("c.jsonl", pair + "\n" + pair);
  EXPECT_TRUE(pairs.has_pairs());
  EXPECT_EQ(text_of(pairs.tokens()), "<s>pc<s>pd<s>pc<s>pd");
  EXPECT_THAT(message_of<IoError>([&] { made("d.jsonl", pair + "\n\n" + single); }), HasSubstr("d.jsonl:3: it has no chosen and rejected"));
  EXPECT_THAT(message_of<IoError>([&] { made("e.jsonl", single + "\n" + pair); }), HasSubstr("e.jsonl:2: it has chosen and rejected"));
  EXPECT_THAT(message_of<UsageError>([&] { made("f.parquet", "PAR1"); }), HasSubstr("f.jsonl', orient='records', lines=True)"));
  int seen = 0;
  llm::each_document(folder / "c.jsonl", tokenizer(), {}, [&](auto) { return ++seen < 3; });
  EXPECT_EQ(seen, 3);
  const std::pair<const char*, const char*> wrong[] = {
      {"[{\"text\": \"a\"},\n{\"text\": \"b]}", "g.json:2: the JSON array is cut off: this object has no end"},
      {"[{\"text\": \"a\"},\n", "g.json:2: the JSON array is cut off: it has no end"},
      {"[\n{\"text\": \"a\"}, \"b\"]", "g.json:2: an item of the JSON array is not an object"},
      {"[{\"text\": \"a\"}]\n\n[{\"text\": \"b\"}]", "g.json:3: there is a text behind the end of the JSON array"}};
  for (const auto& [text, why] : wrong) EXPECT_THAT(message_of<IoError>([&] { made("g.json", text); }), HasSubstr(why));
}

/// Preview and eval read as tokenize does.
TEST(TokenFiles, AreReadAsTheyAreMade) {
  const Folder folder;
  std::string shown;
  const auto read = [&](const char* name, const std::string& text, const TokenizeOptions& options = {}) {
    write_file(folder / name, text);
    shown.clear();
    llm::each_document(folder / name, tokenizer(), options, [&](std::span<const int32_t> tokens) {
      shown += text_of(tokens);
      return true;
    });
    return shown;
  };
  const std::string mark = "\xEF\xBB\xBF", line = R"({"text": "a"})", pair = R"({"prompt": "p", "chosen": "c", "rejected": "d"})";
  EXPECT_EQ(read("a.jsonl", mark + line + "\n" + line), "<s>a<s>a");
  EXPECT_EQ(read("a.JSON", mark + "[" + line + "]"), "<s>a");
  EXPECT_EQ(read("a.TXT", mark + "b"), "<s>b");
  EXPECT_EQ(read("empty.jsonl", ""), "");
  EXPECT_THAT(message_of<IoError>([&] { read("b.jsonl", pair + "\n" + line); }), HasSubstr("b.jsonl:2: it has no chosen and rejected"));
  EXPECT_THAT(message_of<IoError>([&] { read("c.csv", "a,b\n"); }), HasSubstr("c.csv:1: it is not JSON from byte 1 on"));
  EXPECT_THAT(message_of<UsageError>([&] { read("d.Parquet", "PAR1"); }), HasSubstr("Parquet is not read"));
  EXPECT_THAT(message_of<ConfigError>([&] { read("a.jsonl", line, {.chat = named("llama3")}); }),
              HasSubstr("the tokenizer has no token <|begin_of_text|>"));
  // The first byte of a file of tokens is that of a length, which may be a blank.
  std::map<std::string, std::string> metadata = {{"format", "tessera tokens"}, {"vocabulary", "260"}, {"more", ""}};
  for (const int write : {1, 2}) {
    checkpoint::SafetensorsWriter writer(
        folder / "x", {{.name = "ends", .dtype = at::kLong, .sizes = {1}}, {.name = "tokens", .dtype = at::kInt, .sizes = {1}}}, metadata);
    writer.write(at::ones({1}, at::kLong));
    writer.write(at::full({1}, 'a', at::kInt));
    writer.close();
    if (write == 1) metadata["more"].resize(static_cast<uint8_t>(' ' - read_file(folder / "x").front()), '.');
  }
  ASSERT_EQ(read_file(folder / "x").front(), ' ');
  EXPECT_EQ(read("x", read_file(folder / "x")), "a");
}

TEST(TokenFiles, HaveATextAsOneDocument) {
  const Folder folder;
  write_file(folder / "a.txt", "a\nb\n");
  write_file(folder / "empty.txt", "");
  write_file(folder / "b.jsonl", "{\"text\": \"c\"}\n");
  const std::vector<std::filesystem::path> inputs = {folder / "a.txt", folder / "empty.txt", folder / "b.jsonl"};
  llm::tokenize(inputs, folder / "x", tokenizer(), {.end = kEnd});
  const llm::TokenFile tokens(folder / "x");
  EXPECT_EQ(text_of(tokens.tokens()), "<s>a\nb\n</s><s>c</s>");
  EXPECT_THAT(tokens.ends(), ElementsAre(6, 9));
  write_file(folder / "latin.md", "\xe9");
  const std::vector<std::filesystem::path> latin = {folder / "latin.md"};
  EXPECT_THAT(message_of<IoError>([&] { llm::tokenize(latin, folder / "y", tokenizer()); }), HasSubstr("latin.md: it is not UTF-8"));
}

/// Python's safetensors writes such files, too.
TEST(TokenFiles, OfOtherProgramsAreRefusedForWhatTheyLack) {
  const Folder folder;
  const auto path = folder / "x";
  const auto write = [&](const at::Tensor& tokens, const at::Tensor& ends, const std::map<std::string, std::string>& metadata) {
    checkpoint::SafetensorsWriter writer(path,
                                         {{.name = "ends", .dtype = ends.scalar_type(), .sizes = ends.sizes().vec()},
                                          {.name = "tokens", .dtype = tokens.scalar_type(), .sizes = tokens.sizes().vec()}},
                                         metadata);
    writer.write(ends);
    writer.write(tokens);
    writer.close();
  };
  const auto refusal = [&](const auto&... parts) {
    write(parts...);
    return message_of<IoError>([&] { llm::TokenFile{path}; });
  };
  using Metadata = std::map<std::string, std::string>;
  const auto tokens = at::tensor({5, 6, 7}, at::kInt);
  const auto ends = at::tensor({2, 3}, at::kLong);
  EXPECT_THAT(refusal(tokens, ends, Metadata()), HasSubstr("x is not a file of tokens"));
  EXPECT_THAT(refusal(tokens, ends, Metadata{{"format", "tessera tokens"}}), HasSubstr("its metadata have no 'vocabulary'"));
  const Metadata whole = {{"format", "tessera tokens"}, {"vocabulary", "8"}};
  EXPECT_THAT(refusal(tokens.to(at::kLong), ends, whole), HasSubstr("'tokens' are Long and 'ends' are Long, but must be Int and Long"));
  EXPECT_THAT(refusal(tokens, at::tensor({2, 2, 3}, at::kLong), whole), HasSubstr("was not made by tessera data tokenize"));
  EXPECT_THAT(refusal(tokens, at::tensor({2}, at::kLong), whole), HasSubstr("its last document ends at token 2 of 3"));
  write(tokens, ends, whole);
  EXPECT_THAT(llm::TokenFile(path).tokens(), ElementsAre(5, 6, 7));
}

TEST(TokenFiles, NameTheLineThatIsWrong) {
  const Folder folder;
  write_file(folder / "a.jsonl", drawn_lines(600, 30'000) + "\nnonsense\n" + drawn_lines(5, 10));
  const std::vector<std::filesystem::path> inputs = {folder / "a.jsonl"};
  EXPECT_THAT(message_of<IoError>([&] { llm::tokenize(inputs, folder / "x", tokenizer(), {.threads = 3}); }),
              HasSubstr("a.jsonl:661: it is not JSON from byte 2 on"));
  write_file(folder / "empty.jsonl", "\n\n");
  const std::vector<std::filesystem::path> empty = {folder / "empty.jsonl"};
  EXPECT_THAT(message_of<IoError>([&] { llm::tokenize(empty, folder / "y", tokenizer()); }), HasSubstr("there are no documents"));
  write_file(folder / "z", "what");
  EXPECT_THAT(message_of<IoError>([&] { llm::TokenFile(folder / "z"); }), HasSubstr("z is not a safetensors file"));
}

TEST(PackedRows, HaveDocumentsAndTheirPlaces) {
  const Folder folder;
  write_file(folder / "a.jsonl", R"({"text": "abc"}
{"prompt": "de", "completion": "f"}
{"text": "ghijklm"}
{"text": "n"})");
  const std::vector<std::filesystem::path> inputs = {folder / "a.jsonl"};
  llm::tokenize(inputs, folder / "t", tokenizer(), {.end = kEnd});  // <s>abc</s> <s>def</s> <s>ghijklm</s> <s>n</s>
  const llm::TokenFile file(folder / "t");
  const llm::PackedRows cut(file, 8);
  ASSERT_EQ(cut.size(), 3);
  const std::vector<int64_t> all = {0, 1, 2};
  const auto rows = cut(all);
  const auto expect_row = [&](const at::Tensor& values, std::vector<int64_t> expected) {
    EXPECT_TRUE(at::equal(values, at::tensor(expected, at::kLong))) << values;
  };
  expect_row(rows.inputs[0][0], {kBegin, 'a', 'b', 'c', kEnd, kBegin, 'd', 'e'});
  expect_row(rows.inputs[0][1], {0, 1, 2, 3, 4, 0, 1, 2});
  expect_row(rows.targets[0], {'a', 'b', 'c', kEnd, -100, -100, -100, 'f'});
  expect_row(rows.inputs[1][0], {'f', kEnd, kBegin, 'g', 'h', 'i', 'j', 'k'});
  expect_row(rows.inputs[1][1], {0, 1, 0, 1, 2, 3, 4, 5});
  expect_row(rows.targets[2], {'m', kEnd, -100, 'n', kEnd, -100, -100, -100});
  expect_row(rows.inputs[2][1], {0, 1, 2, 0, 1, 2, 0, 1});

  const llm::PackedRows whole(file, 8, llm::Packing::Whole);
  ASSERT_EQ(whole.size(), 3);  // the third is longer than a row
  const auto apart = whole(all);
  expect_row(apart.inputs[0][0], {kBegin, 'g', 'h', 'i', 'j', 'k', 'l', 'm'});  // full first
  expect_row(apart.targets[0], {'g', 'h', 'i', 'j', 'k', 'l', 'm', kEnd});
  expect_row(apart.inputs[1][0], {kBegin, 'd', 'e', 'f', kEnd, kBegin, 'n', kEnd});
  expect_row(apart.targets[1], {-100, -100, 'f', kEnd, -100, 'n', kEnd, -100});
  expect_row(apart.inputs[2][0], {kBegin, 'a', 'b', 'c', kEnd, kEnd, 0, 0});  // with the end of the third document
  expect_row(apart.inputs[2][1], {0, 1, 2, 3, 4, 0, 0, 1});
  expect_row(apart.inputs[2][2], {1, 1, 1, 1, 1, 1, 0, 0});  // padding
  expect_row(apart.inputs[1][2], {1, 1, 1, 1, 1, 1, 1, 1});
  expect_row(apart.targets[2], {'a', 'b', 'c', kEnd, -100, -100, -100, -100});
  EXPECT_THAT(message_of<ConfigError>([&] { llm::expect_vocabulary(file.path(), file.vocabulary(), 100); }),
              HasSubstr("a vocabulary of 260, but the model knows only 100"));
  EXPECT_THAT(message_of<UsageError>([&] { llm::PackedRows(file, 1); }), HasSubstr("rows of 1 tokens"));
}

}  // namespace
}  // namespace tessera::testing::token_file_test
