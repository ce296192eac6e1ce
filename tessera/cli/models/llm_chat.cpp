// `tessera llm chat`.
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/process.h"
#include "tessera/cli/help.h"
#include "tessera/cli/models/llm.h"
#include "tessera/llm/chat.h"

namespace tessera::cli {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kLongestTraced = 4096;  // room of the cache on devices that compile steps, where all of it is read for each token
constexpr std::chrono::hours kThinking{24 * 365};  // how long ranks wait for a line

std::atomic<bool> ctrl_c = false;
std::atomic<int> told_of_ctrl_c = -1;  // a pipe, because a signal that another thread takes does not end a wait for input

/// Makes this process group that of the terminal if tessera launch is: it starts ranks in groups of their own, which may not read from the
/// terminal, and which Ctrl-C does not reach.
class Foreground : NoCopy {
 public:
  Foreground() {
    const auto launcher = ::getpgid(::getppid());
    if (launcher == ::getpgrp() || ::tcgetpgrp(STDIN_FILENO) != launcher) return;
    ::signal(SIGTTOU, SIG_IGN);  // sent to a group that takes the terminal
    ::signal(SIGTSTP, SIG_IGN);  // Ctrl-Z would stop this rank alone
    if (::tcsetpgrp(STDIN_FILENO, ::getpgrp()) == 0) before_ = launcher;
  }
  ~Foreground() {
    if (before_ > 0) ::tcsetpgrp(STDIN_FILENO, before_);
  }

 private:
  pid_t before_ = 0;
};

/// Makes Ctrl-C set `ctrl_c`, and end the wait for a line.
class Keyboard : NoCopy {
 public:
  Keyboard() {
    told_of_ctrl_c = pipe_.write.get();
    struct sigaction action {};
    action.sa_handler = [](int) {
      const int reason = errno;
      ctrl_c = true;
      if (::write(told_of_ctrl_c, "", 1) < 0) errno = reason;  // full: it will wake the reader all the same
    };
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGINT, &action, &before_);
  }
  ~Keyboard() { ::sigaction(SIGINT, &before_, nullptr); }

  /// Forgets a Ctrl-C of the past, shows `prompt`, and returns a line; nothing at the end, or after Ctrl-C.
  std::optional<std::string> read_line(const std::function<void()>& prompt) {
    pollfd from[] = {{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0}, {.fd = pipe_.read.get(), .events = POLLIN, .revents = 0}};
    char bytes[4096];
    while (::poll(from + 1, 1, 0) > 0 && ::read(from[1].fd, bytes, sizeof bytes) > 0) {
    }
    prompt();
    for (bool ended = false;;) {
      if (const auto end = std::min(typed_.find('\n'), ended ? typed_.size() : std::string::npos); end != std::string::npos) {
        if (ended && typed_.empty()) return {};
        const auto line = typed_.substr(0, end);
        typed_.erase(0, end + 1);
        return line;
      }
      if (::poll(from, 2, -1) < 0) continue;
      if (from[1].revents != 0) return {};
      const auto count = ::read(STDIN_FILENO, bytes, sizeof bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw IoError("standard input can't be read: {}", std::strerror(errno));
      ended = count == 0;
      if (count > 0) typed_.append(bytes, static_cast<size_t>(count));
    }
  }

 private:
  Foreground foreground_;
  Pipe pipe_;
  std::string typed_;
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
    if (is_terminal()) used_.printing()("/exit or Ctrl-D ends, /clear begins anew, /regen answers again; Ctrl-C stops an answer\n");
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
  void end_turns() try {
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
  } catch (const UsageError&) {
    // Templates such as alpaca write one question and its answer: nothing follows it.
  }

  /// Returns what is typed on rank 0; nothing at the end.
  std::optional<std::string> next_line() {
    std::string line = "/exit";
    if (used_.world.is_first()) {
      const auto typed = keyboard_.read_line([&] { if (is_terminal()) used_.printing()("> "); });
      if (!typed && is_terminal()) used_.printing()("\n");
      line = typed.value_or(line);
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

  Keyboard keyboard_;
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
                                "answer, and ends where a line is awaited."));
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
