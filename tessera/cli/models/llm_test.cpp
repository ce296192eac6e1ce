// `tessera llm` writes what the library's functions return, on one rank and on several, and measures what can be computed from scores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/models/generate.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"
#include "tests/testing/small_llama.h"

namespace tessera::testing::cli_llm_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kText = "ab\u00e9 abc", kChatMl = "<|im_start|>user\nab\u00e9<|im_end|>\n<|im_start|>assistant\n";

struct LlmCommand : ::testing::Test {
  const Folder folder;
  const std::string path = folder / "model";
  const models::LlamaForCausalLM model = made();
  const data::Tokenizer tokenizer = small_tokenizer("qwen2");

  models::LlamaForCausalLM made() const {
    std::filesystem::create_directories(path);
    auto config = small_config("qwen3");
    config.max_position_embeddings = 400;
    auto written = write_model(path, config);
    written->eval();
    return written;
  }
  static Command llm(const Command& arguments) {
    Command command = {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "llm"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }
  static Launched::Ended ended(const Command& arguments, const std::string& typed = {}) {
    if (typed.empty()) return Launched(llm(arguments)).end();
    Command command = {"sh", "-c", "printf '" + typed + "' | exec \"$@\"", "sh"};
    const auto words = llm(arguments);
    command.insert(command.end(), words.begin(), words.end());
    return Launched(command).end();
  }
  std::string decoded(const at::Tensor& tokens, int64_t from) const {
    const auto all = tokens.flatten().to(at::kInt);
    return tokenizer.decode({all.const_data_ptr<int32_t>() + from, static_cast<size_t>(all.numel() - from)});
  }
  at::Tensor encoded(const std::string& text, data::Ends ends = data::Ends::Added) const {
    const auto tokens = tokenizer.encode(text, ends);
    return at::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), at::kLong).unsqueeze(0);
  }
  std::string continued(const std::string& text, models::GenerateOptions options, data::Ends ends = data::Ends::Added) {
    const auto tokens = encoded(text, ends);
    options.vocabulary = tokenizer.size();
    return decoded(models::generate(*const_cast<models::LlamaForCausalLM&>(model), tokens, options), tokens.size(1));
  }
};

TEST_F(LlmCommand, ContinuesTexts) {
  const auto text = continued(kText, {.most = 40});
  const auto one = ended({"generate", path, "--prompt", kText, "--max-new-tokens", "40", "--ignore-eos"});
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(one.out, text + "\n");
  EXPECT_THAT(one.err, HasSubstr("a second; text: 40 tokens, "));
  const auto held = ended({"generate", path, "--prompt", kText, "--max-new-tokens", "4", "--quantisation", "int8", "--dtype", "bfloat16"});
  EXPECT_EQ(held.status, 0) << held.err;
  // "ab" is the token that ends texts.
  EXPECT_EQ(ended({"generate", path, "--prompt", kText, "--max-new-tokens", "40"}).out, text.substr(0, text.find("ab")) + "\n");

  const auto stop = text.substr(text.size() / 2, 3);
  const auto stopped = ended({"generate", path, "--prompt", kText, "--max-new-tokens", "40", "--ignore-eos", "--stop", stop});
  EXPECT_EQ(stopped.out, text.substr(0, text.find(stop)) + "\n");

  write_file(folder / "prompts", kText + "\n\nx\n");
  const Command draw = {"generate", path, "--prompts", folder / "prompts", "--out", folder / "out.jsonl", "--max-new-tokens", "9", "--temperature", "0.8",
                        "--top-k", "30", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2", "--seed", "3", "--ignore-eos"};
  const auto drawn = ended(draw);
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  const auto written = lines(read_file(folder / "out.jsonl"));
  ASSERT_EQ(written.size(), 2U);
  for (size_t i = 0; i < 2; i++) {
    const auto prompt = i == 0 ? kText : "x";
    const auto expected = continued(prompt, {.most = 9, .temperature = 0.8, .top_k = 30, .top_p = 0.9, .min_p = 0.01, .repetition_penalty = 1.2, .seed = 3 + i});
    EXPECT_EQ(nlohmann::json::parse(written[i]), nlohmann::json({{"prompt", prompt}, {"text", expected}}));
  }
  const auto before = read_file(folder / "out.jsonl");
  std::filesystem::remove(folder / "out.jsonl");
  const auto two = run("2", llm(draw));
  EXPECT_EQ(two.status, 0) << two.err;
  EXPECT_EQ(read_file(folder / "out.jsonl"), before);
}

TEST_F(LlmCommand, UsesAdaptersAndTheAuthorsSettings) {
  auto adapted = model;
  const auto plain = continued(kText, {.most = 12});
  lora::apply(adapted, {.r = 2, .lora_alpha = 8});
  {
    const torch::NoGradGuard no_grad;
    for (const auto& each : adapted->named_parameters()) {
      if (each.key().find("lora_") != std::string::npos) each.value().normal_(0, 0.3);
    }
  }
  checkpoint::save_adapter(adapted, folder / "adapter", self_world());
  const auto text = continued(kText, {.most = 12, .temperature = 1, .top_k = 5, .seed = 42});
  EXPECT_NE(continued(kText, {.most = 12}), plain);
  write_file(path + "/generation_config.json", R"({"do_sample": true, "top_k": 5, "eos_token_id": [256]})");
  const auto one = ended({"generate", path, "--adapter", folder / "adapter", "--prompt", kText, "--max-new-tokens", "12", "--ignore-eos"});
  EXPECT_EQ(one.out, text + "\n") << one.err;
}

TEST_F(LlmCommand, TalksWithAMemory) {
  const auto first = continued(kChatMl, {.most = 16}, data::Ends::Bare);
  const auto second = continued(kChatMl + first + "<|im_end|>\n" + kChatMl, {.most = 16}, data::Ends::Bare);
  const Command chat = {"chat", path, "--chat", "chatml", "--max-new-tokens", "16", "--ignore-eos"};
  const auto talk = ended(chat, "ab\u00e9\n/regen\nab\u00e9\n/clear\nab\u00e9\n/exit\nnever read\n");
  EXPECT_EQ(talk.status, 0) << talk.err;
  EXPECT_EQ(talk.out, first + "\n" + first + "\n" + second + "\n" + first + "\n");
  const auto full = ended(chat, "ab\u00e9\nab\u00e9\nab\u00e9\nab\u00e9\nab\u00e9\nab\u00e9\n");
  EXPECT_THAT(full.err, HasSubstr("400 can be read and written; /clear begins a new one"));
  EXPECT_THAT(ended({"chat", path}, "a\n").err, HasSubstr("has no chat template; give --chat chatml, llama3, alpaca or FILE.jinja"));
}

TEST_F(LlmCommand, CtrlCStopsAnAnswerAndAtThePromptTheChat) {
  auto config = nlohmann::json::parse(read_file(path + "/config.json"));
  config["max_position_embeddings"] = 40'000;  // so that the answer would take minutes
  write_file(path + "/config.json", config.dump());
  OnTerminal terminal(llm({"chat", path, "--chat", "chatml", "--max-new-tokens", "39000", "--ignore-eos"}));
  const auto type = [&](const std::string& text) { EXPECT_EQ(::write(terminal.keyboard.get(), text.data(), text.size()), std::ssize(text)); };
  terminal.wait_for({"> "});
  type("a\n");
  terminal.wait_for({"a\r\n"});  // which the terminal itself writes
  char letter = 0;
  EXPECT_EQ(::read(terminal.keyboard.get(), &letter, 1), 1);  // of the answer, so that Ctrl-C does not come before the line is read
  type("\x03");
  terminal.wait_for({"> "});
  type("\x03");
  EXPECT_THAT(terminal.screen(), HasSubstr(" a second; text: "));
  EXPECT_EQ(terminal.process.wait(std::chrono::seconds(20)).value_or(-1), 0);
}

TEST_F(LlmCommand, TalksOnTheTerminalOfALauncher) {
  OnTerminal terminal(launch("2", llm({"chat", path, "--chat", "chatml", "--max-new-tokens", "8", "--ignore-eos"})));
  terminal.wait_for({"> "});
  EXPECT_EQ(::write(terminal.keyboard.get(), "a\n", 2), 2);
  terminal.wait_for({"> "});  // after the answer
  EXPECT_EQ(::write(terminal.keyboard.get(), "\x03", 1), 1);
  EXPECT_THAT(terminal.screen(), HasSubstr("; text: 8 tokens"));
  EXPECT_EQ(terminal.process.wait(std::chrono::seconds(20)).value_or(-1), 0);
}

TEST_F(LlmCommand, MeasuresPerplexity) {
  std::string text;
  for (int i = 0; i < 40; i++) text += "line " + std::to_string(i * i) + " ab\n";
  write_file(folder / "a.txt", text);
  write_file(folder / "b.jsonl", R"({"text": "ab ab x"}
{"prompt": "a b", "completion": " c d e"}
)");
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> losses;
  const auto measure = [&](const at::Tensor& tokens, int64_t length, int64_t stride, int64_t learned) {
    for (int64_t begin = 0, counted = 0; counted < tokens.size(1); begin += stride) {
      const auto end = std::min(begin + length, tokens.size(1)), from = std::max({counted, begin + 1, learned});
      const auto scores = const_cast<models::LlamaForCausalLM&>(model)(tokens.slice(1, begin, end))[0].log_softmax(-1);
      for (auto i = from; i < end; i++) losses.push_back(-scores[i - 1 - begin][tokens[0][i].item<int64_t>()]);
      counted = end;
    }
  };
  const auto end = encoded("ab", data::Ends::Bare);  // "ab" is the token that ends texts
  ASSERT_EQ(end.numel(), 1);
  for (const auto& [length, stride] : {std::pair(64, 24), std::pair(50, 49)}) {
    losses.clear();
    measure(at::cat({encoded(text), end}, 1), length, stride, 1);
    measure(at::cat({encoded("ab ab x"), end}, 1), length, stride, 1);
    measure(at::cat({encoded("a b"), encoded(" c d e", data::Ends::Bare), end}, 1), length, stride, encoded("a b").size(1));
    const auto all = at::stack(losses).to(at::kDouble);
    const auto perplexity = all.mean().exp().item<double>(), error = perplexity * all.std(/*unbiased=*/true).item<double>() / std::sqrt(all.numel());
    const Command eval = {"eval", path, folder / "a.txt", folder / "b.jsonl", "--length", std::to_string(length), "--stride", std::to_string(stride)};
    const auto one = ended(eval), two = run("2", llm(eval));
    for (const auto& [status, out, err] : {one, two}) {
      EXPECT_EQ(status, 0) << err;
      double found = 0, around = 0;
      const auto place = out.find("perplexity ");
      ASSERT_NE(place, std::string::npos) << out << err;
      ASSERT_EQ(std::sscanf(out.c_str() + place, "perplexity %lf +- %lf", &found, &around), 2);
      EXPECT_NEAR(found, perplexity, 1e-4 * perplexity);
      EXPECT_NEAR(around, error, 1e-3 * error);
      EXPECT_THAT(out, HasSubstr("over " + std::to_string(all.numel()) + " tokens in windows of " + std::to_string(length)));
    }
  }
}

TEST_F(LlmCommand, ShowsWhatIsLearned) {
  write_file(folder / "a.jsonl", R"({"prompt": "x", "completion": "y"})");
  write_file(folder / "empty.jsonl", "\n");
  const auto preview = [&](const char* file, const Command& more = {}) {
    auto command = llm({"preview", folder / file, "--tokenizer", path, "--end", "none"});
    command[1] = "data";
    command.insert(command.end(), more.begin(), more.end());
    return Launched(command).end();
  };
  const auto shown = preview("a.jsonl");
  EXPECT_THAT(shown.out, HasSubstr("3 tokens, of which 1 is learned\n<|begin_of_text|>x\u27e6y\u27e7\n")) << shown.err;
  EXPECT_THAT(preview("empty.jsonl").err, HasSubstr("there are no documents to show"));
  EXPECT_THAT(preview("a.jsonl", {"--chat", "llama3"}).err, HasSubstr("the tokenizer has no token <|"));
}

TEST_F(LlmCommand, NamesWhatIsWrong) {
  write_file(folder / "empty.txt", "");
  write_file(folder / "latin1.txt", "ab\xe9");
  checkpoint::SafetensorsWriter tokens(folder / "large.tokens",
                                       {{.name = "ends", .dtype = at::kLong, .sizes = {1}}, {.name = "tokens", .dtype = at::kInt, .sizes = {2}}},
                                       {{"format", "tessera tokens"}, {"vocabulary", "301"}});
  tokens.write(at::tensor({2}, at::kLong));
  tokens.write(at::tensor({1, 300}, at::kInt));
  tokens.close();
  write_file(folder / "long.txt", "a\r\n" + std::string(500, 'a') + "\n");
  const std::pair<Command, const char*> wrong[] = {
      {{"generate", folder / "none", "--prompt", "a"}, "give a folder of the Hugging Face Hub that is on this disk, or a GGUF file"},
      {{"generate", path}, "give one of --prompt TEXT, --prompt-file FILE, and --prompts FILE with --out FILE"},
      {{"generate", path, "--prompts", "a"}, "--prompts and --out belong together"},
      {{"generate", path, "--prompt-file", folder / "empty.txt"}, "is empty, and there is nothing to write after"},
      {{"generate", path, "--prompt-file", folder / "latin1.txt"}, "latin1.txt: byte 3 is not UTF-8"},
      {{"generate", path, "--prompts", folder / "long.txt", "--out", folder / "o"}, "prompt 2 has 501 tokens, and the model takes 400 with what it writes"},
      {{"generate", path, "--prompts", folder / "long.txt", "--out", folder / "long.txt"}, "long.txt has the prompts; give another file"},
      {{"generate", path, "--prompt", "a", "--top-k", "3"}, "give --temperature 1, too"},
      {{"generate", path, "--prompt", std::string(500, 'a')}, "and the model takes 400 with what it writes; give a shorter prompt"},
      {{"generate", path, "--prompt", "a", "--adapter", path}, "is not a folder of PEFT"},
      {{"eval", path, folder / "none"}, "none"},
      {{"eval", path, folder / "large.tokens"}, "large.tokens has tokens of a vocabulary of 301, but the model knows only 260"},
      {{"eval", path, folder / "empty.txt", "--length", "401"}, "--length 401: the model takes at most 400 tokens"},
      {{"eval", path, folder / "long.txt", "--length", "50", "--stride", "50"}, "counts in the window before it; give at most 49"},
      {{"eval", path, folder / "empty.txt", "--stride", "399"}, "nothing can be measured; give longer texts"},
  };
  for (const auto& [command, says] : wrong) {
    const auto refused = ended(command);
    EXPECT_NE(refused.status, 0) << ::testing::PrintToString(command);
    EXPECT_THAT(refused.err, HasSubstr(says));
  }
}

}  // namespace
}  // namespace tessera::testing::cli_llm_test
