// Writes conversations as texts for a model, by chat templates.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::llm {

struct Message {
  std::string role, content;  // "system", "user" or "assistant"
};

/// A part of a text for training.
struct Segment {
  std::string text;
  bool trained = true;  // false: the model reads this part, but does not learn to write it
};

enum class ChatTemplate { ChatMl, Llama3, Alpaca };

/// Returns the template with the name chatml, llama3 or alpaca. Throws ConfigError that lists these names for another name.
ChatTemplate chat_template_named(std::string_view name);

/// Renders a whole conversation. The assistant's words are trained, with the end of its turn. Throws UsageError for a role or an order of
/// roles that the template can't write.
std::vector<Segment> render(ChatTemplate chat, std::span<const Message> messages);
/// Renders the prompt of a model, up to where the assistant's answer begins.
std::string prompt_of(ChatTemplate chat, std::span<const Message> messages);
/// The marks that a template writes around messages, each of which must be a token.
std::span<const std::string_view> marks_of(ChatTemplate chat);
/// The token that ends the assistant's turn; empty if it is the end of the text.
std::string_view end_of_turn(ChatTemplate chat);

}  // namespace tessera::llm
