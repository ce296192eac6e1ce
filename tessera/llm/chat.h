// How conversations are written for a model, by the names of the templates.
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
  bool trained = true;  // or only read
};

enum class ChatTemplate { ChatMl, Llama3, Alpaca };

/// chatml, llama3, alpaca. Throws ConfigError, with these names, for another one.
ChatTemplate chat_template_named(std::string_view name);

/// The whole conversation: what the assistant says is trained, with the end of its turn. Throws UsageError for a role or an order of roles
/// that the template can't write.
std::vector<Segment> render(ChatTemplate chat, std::span<const Message> messages);
/// As a model is asked: up to where the assistant's answer begins.
std::string prompt_of(ChatTemplate chat, std::span<const Message> messages);
/// What it writes around messages and must be tokens.
std::span<const std::string_view> marks_of(ChatTemplate chat);
/// The token that ends the assistant's turn; empty if it is the end of the text.
std::string_view end_of_turn(ChatTemplate chat);

}  // namespace tessera::llm
