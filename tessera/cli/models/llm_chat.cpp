// `tessera llm chat`.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"
#include "tessera/cli/help.h"
#include "tessera/cli/models/llm.h"
#include "tessera/llm/chat.h"

namespace tessera::cli {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kLongestTraced = 4096;  // room of the cache on devices that compile steps, where all of it is read for each token
constexpr std::chrono::hours kThinking{24 * 365};  // how long ranks wait for a line

std::atomic<bool> ctrl_c = false;

/// Makes Ctrl-C set `ctrl_c`, and end the reading of a line.
class CtrlC : NoCopy {
 public:
  CtrlC() {
    struct sigaction action {};
    action.sa_handler = [](int) { ctrl_c = true; };
    ::sigaction(SIGINT, &action, &before_);
  }
  ~CtrlC() { ::sigaction(SIGINT, &before_, nullptr); }

 private:
  struct sigaction before_ {};
};

class Chat {
 public:
  Chat(LanguageModel& used, const llm::ChatTemplate& chat, const SamplingFlags& flags, const std::string& system)
      : used_(used),
        chat_(chat),
        options_(used.options_of(flags)),
        stops_(flags.stops),
        longest_(std::min(used.config.max_position_embeddings,
                          used.world.traits().traces ? kLongestTraced : used.config.max_position_embeddings)),
        cache_(longest_) {
    if (!system.empty()) beginning_.push_back({{"role", "system"}, {"content", system}});
    messages_ = beginning_;
    if (!flags.ignores_ends) end_turns();
  }

  void run() {
    const CtrlC handler;
    if (is_terminal()) used_.note("/exit or Ctrl-D ends, /clear begins anew, /regen answers again; Ctrl-C stops an answer");
    while (const auto line = next_line()) {
      if (*line == "/exit") break;
      if (line->empty()) continue;
      if (*line == "/clear") {
        messages_ = beginning_;
      } else if (*line == "/regen") {
        if (messages_.empty() || messages_.back()["role"] != "assistant") {
          used_.note("there is no answer yet");
          continue;
        }
        messages_.erase(messages_.size() - 1);
        take_turn();
      } else {
        messages_.push_back({{"role", "user"}, {"content", *line}});
        take_turn();
      }
    }
    used_.note(speed_of(sum_));
  }

 private:
  static bool is_terminal() { return ::isatty(STDIN_FILENO) != 0; }

  /// Finds out what the template writes after an answer: a token, or a text.
  void end_turns() {
    const std::string answer = "tesseraanswer", next = "tesseranext";
    const auto text = chat_.prompt({{{"role", "user"}, {"content", "a"}},
                                    {{"role", "assistant"}, {"content", answer}},
                                    {{"role", "user"}, {"content", next}}});
    const auto place = text.find(answer);
    if (place == std::string::npos) return;
    auto after = text.substr(place + answer.size());
    after.erase(0, after.find_first_not_of(" \n"));
    after.resize(std::min({after.size(), after.find('\n'), after.find(next)}));
    const auto tokens = used_.tokenizer.encode(after, data::Ends::Bare);
    if (tokens.empty()) return;
    if (used_.tokenizer.decode(std::span(tokens).first(1)).empty()) {
      options_.ends.push_back(tokens.front());
    } else {
      stops_.push_back(after);
    }
  }

  /// Returns what is typed on rank 0; nothing at the end.
  std::optional<std::string> next_line() {
    std::string line = "/exit";
    if (used_.world.is_first()) {
      for (bool is_read = false; !is_read;) {
        if (is_terminal()) used_.printing()("> ");
        is_read = static_cast<bool>(std::getline(std::cin, line));
        if (!is_read && !ctrl_c.exchange(false)) line = "/exit", is_read = true;
        if (is_read) break;
        std::cin.clear();
        ::clearerr(stdin);
        used_.printing()("\n");
      }
    }
    if (used_.world.traits().can_differ()) line = used_.world.with_limit(kThinking).texts(line, {.unit = "the next line"}).front();
    return line == "/exit" ? std::nullopt : std::optional(line);
  }

  /// Answers the last message.
  void take_turn() {
    const auto tokens = used_.encode(chat_.prompt(messages_), chat_.is_bare() ? data::Ends::Added : data::Ends::Bare);
    if (std::ssize(tokens) >= longest_) {
      used_.note(fmt::format("the conversation has {} tokens, and {} can be read and written; /clear begins a new one", tokens.size(), longest_));
      messages_.erase(messages_.size() - 1);
      return;
    }
    const auto same = std::ranges::mismatch(tokens, seen_).in1 - tokens.begin();
    cache_.keep(std::min<int64_t>(same, std::ssize(tokens) - 1));
    auto options = options_;
    options.most = std::min(options.most, longest_ - std::ssize(tokens));
    options.seed += turns_++;
    options.cache = &cache_;
    ctrl_c = false;
    const auto answer = used_.answer(tokens, options, stops_, used_.printing(), [] { return ctrl_c.load(); });
    ctrl_c = false;
    used_.printing()("\n");
    if (answer.added == options.most && options.most < options_.most)
      used_.note(fmt::format("the conversation is at the {} tokens that can be read and written; /clear begins a new one", longest_));
    seen_ = answer.tokens;
    seen_.pop_back();  // was not read yet
    messages_.push_back({{"role", "assistant"}, {"content", answer.text}});
    sum_.count(answer);
  }

  LanguageModel& used_;
  const llm::ChatTemplate& chat_;
  models::GenerateOptions options_;
  std::vector<std::string> stops_;
  const int64_t longest_;
  models::LlamaCache cache_;
  std::vector<int64_t> seen_;  // the tokens in the cache
  OrderedJson beginning_ = OrderedJson::array(), messages_;
  uint64_t turns_ = 0;
  Answer sum_;
};

}  // namespace

void add_llm_chat(CLI::App& command, std::function<int()>& chosen) {
  struct Given {
    ModelFlags model;
    SamplingFlags sampling;
    std::string system, chat;
  };
  auto* flags = command.add_subcommand("chat", "Talks with a model");
  const auto given = std::make_shared<Given>();
  add_model_flags(*flags, given->model);
  flags->add_option("--system", given->system, "How the model should behave: the system message")->type_name("TEXT");
  add_chat_flag(*flags, given->chat);
  add_sampling_flags(*flags, given->sampling, 1024);
  flags->footer(Help::footer_of({"tessera llm chat SmolLM2-135M-Instruct --system 'Answer in one sentence.'",
                                 "echo 'Why is the sky blue?' | tessera llm chat my.gguf --temperature 0.7"},
                                "Each line is a message. /exit or Ctrl-D ends, /clear begins a new conversation, /regen answers again, Ctrl-C stops an "
                                "answer (under tessera launch: all)."));
  flags->callback([&chosen, given] {
    chosen = [=] {
      LanguageModel used(given->model);
      const auto chat = chat_template(given->chat, given->model.model);
      if (!chat) throw ConfigError("{} has no chat template; give --chat chatml, llama3, alpaca or FILE.jinja", given->model.model);
      Chat(used, *chat, given->sampling, given->system).run();
      return 0;
    };
  });
}

}  // namespace tessera::cli
