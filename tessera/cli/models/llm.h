// The parts that the commands of `tessera llm` share: a model that is loaded over the ranks, and answers that come as text.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/data/tokenizer.h"
#include "tessera/llm/chat.h"
#include "tessera/models/generate.h"

namespace tessera::cli {

struct ModelFlags {
  std::filesystem::path model;
  std::vector<std::filesystem::path> adapters;
  std::string dtype = "auto", quantisation;
};
/// Adds MODEL, --adapter, --dtype and --quantisation.
void add_model_flags(CLI::App& command, ModelFlags& flags);

/// Adds --chat. chat_template() returns the template with that name or in that file, or else that of the model if it has one.
void add_chat_flag(CLI::App& command, std::string& chat);
std::optional<llm::ChatTemplate> chat_template(const std::string& chat, const std::filesystem::path& model);

/// Adds --end. end_token() returns the token with that name, or else the one with which the model's texts end. A text may end with none.
void add_end_flag(CLI::App& command, std::string& end);
std::optional<int32_t> end_token(const std::string& end, const data::Tokenizer& tokenizer, const std::filesystem::path& model);

/// How tokens are drawn. What is not given comes from the model's generation_config.json.
struct SamplingFlags {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  int64_t most = 0;
  uint64_t seed = 42;
  std::vector<std::string> stops;
  bool ignores_ends = false;
};
void add_sampling_flags(CLI::App& command, SamplingFlags& flags, int64_t most);

using Print = std::function<void(std::string_view text)>;

/// Turns tokens into text as they come: prints whole characters, and nothing from a stop text on.
class TextStream {
 public:
  /// `before` are the tokens before the first one that is added: they decide whether it begins with a blank.
  TextStream(const data::Tokenizer& tokenizer, std::span<const int64_t> before, std::vector<std::string> stops, Print print);

  /// Returns false if a stop text has come.
  bool add(int64_t token);
  /// Prints what was held back, because it might have become a character or a stop text.
  void finish();
  const std::string& text() const { return text_; }

 private:
  enum class Hold { Back, Nothing };
  bool show(Hold hold);

  const data::Tokenizer& tokenizer_;
  std::vector<int32_t> tokens_;
  size_t begin_ = 0, read_;  // the tokens up to `read_` are in the text; those from `begin_` on are decoded again
  const std::vector<std::string> stops_;
  const Print print_;
  std::string text_;
  size_t shown_ = 0;
  bool stopped_ = false;
};

struct Answer {
  std::vector<int64_t> tokens;  // those of the prompt, too
  std::string text;
  int64_t read = 0, added = 0;
  int64_t steps = 0;                 // how many of the added tokens needed a pass of their own: all but the first one
  double to_read = 0, to_write = 0;  // seconds

  /// Adds the numbers of another answer.
  void count(const Answer& other);
};

/// A model on all ranks, each of which has its share.
class LanguageModel {
 public:
  explicit LanguageModel(const ModelFlags& flags);

  models::GenerateOptions options_of(const SamplingFlags& flags) const;
  /// Writes after the tokens. Ends early if `interrupted` returns true on any rank. Collective, and the same on all ranks but for `print`.
  Answer answer(const std::vector<int64_t>& tokens, models::GenerateOptions options, const std::vector<std::string>& stops,
                const Print& print, const std::function<bool()>& interrupted = {});
  std::vector<int64_t> encode(std::string_view text, data::Ends ends) const;
  /// Prints on rank 0. On a terminal, control characters are shown instead of obeyed.
  Print printing() const;
  /// Prints a line on standard error of rank 0.
  void note(const std::string& line) const;

  const Communicator world;
  const models::LlamaConfig config;
  const data::Tokenizer tokenizer;
  models::LlamaForCausalLM model{nullptr};

 private:
  const nlohmann::json generation_;
};

/// "prompt: 12 tokens, 240.0 a second; text: 64 tokens, 31.2 a second"
std::string speed_of(const Answer& sum);

// Each function adds a command of `tessera llm`.
void add_llm_chat(CLI::App& command, std::function<int()>& chosen);
void add_llm_generate(CLI::App& command, std::function<int()>& chosen);
void add_llm_eval(CLI::App& command, std::function<int()>& chosen);

}  // namespace tessera::cli
