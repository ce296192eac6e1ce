// Writes conversations as texts for a model, by its chat template. This header needs nlohmann-json.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::llm {

/// A part of a text for training.
struct Segment {
  std::string text;
  bool trained = true;  // false: the model reads this part, but does not learn to write it
};

/// A Jinja template with the special tokens that it writes. May be used by several threads. Messages are a list of {"role", "content"},
/// where content is a text or a list of parts {"type": "text", "text"}, with all else that the template reads. `variables` is an object with what the template reads beside them, such as the list "tools".
class ChatTemplate {
 public:
  using Json = nlohmann::ordered_json;

  /// Returns the template with the name chatml, llama3 or alpaca. Throws ConfigError that lists these names for another name.
  static ChatTemplate named(std::string_view name);
  /// Returns the template of a model, which is a Hugging Face folder or a GGUF file; or else that in `file`, with the model's special
  /// tokens. Throws ConfigError if there is none, or one with a mistake.
  static ChatTemplate of(const std::filesystem::path& model, const std::filesystem::path& file = {});
  static std::optional<ChatTemplate> found_in(const std::filesystem::path& model);

  /// Renders a conversation. Trained is what the template has in {% generation %}, or else what it writes for a message of the assistant
  /// after the beginning of any answer; in both cases only of messages from the given one on, without those whose weight is 0. Throws
  /// UsageError for messages that the template refuses, for tool calls that it does not write, for roles that it does not name, and if
  /// nothing is trained.
  std::vector<Segment> render(const Json& messages, const Json* variables = nullptr, size_t learned_from = 0) const;
  /// Renders the prompt of a model, up to where the assistant's answer begins.
  std::string prompt(const Json& messages, const Json* variables = nullptr) const;

  /// The text and the special tokens.
  std::string description() const;
  /// Whether texts neither begin nor end with the model's own tokens, so that a tokenizer has to add them.
  bool is_bare() const;
  /// Texts that a template with a name writes, each of which must be a token.
  std::vector<std::string> marks() const;

 private:
  struct Inside;
  static std::optional<ChatTemplate> made(const std::filesystem::path& model, const std::filesystem::path& from);
  explicit ChatTemplate(std::shared_ptr<const Inside> inside) : inside_(std::move(inside)) {}

  std::shared_ptr<const Inside> inside_;
};

}  // namespace tessera::llm
