#include "tessera/llm/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"

namespace tessera::llm {
namespace {

constexpr std::array<std::pair<std::string_view, ChatTemplate>, 3> kNames = {
    {{"chatml", ChatTemplate::ChatMl}, {"llama3", ChatTemplate::Llama3}, {"alpaca", ChatTemplate::Alpaca}}};
constexpr auto kAlpacaTask =
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n";

/// Returns the text as Python's str.strip leaves it, which the template calls.
std::string trimmed(std::string_view text) {
  const auto is_blank = [](char32_t character) { return data::is_white(character) || (character >= 0x1C && character <= 0x1F); };
  while (!text.empty() && is_blank(data::first_character(text))) text.remove_prefix(data::length_of_first(text));
  while (!text.empty()) {
    const auto last = data::last_character(text);
    if (!is_blank(data::first_character(text.substr(last)))) break;
    text = text.substr(0, last);
  }
  return std::string(text);
}

void expect_roles(std::span<const Message> messages) {
  if (messages.empty()) throw UsageError("a conversation has no messages");
  for (const auto& message : messages) {
    if (message.role != "system" && message.role != "user" && message.role != "assistant")
      throw UsageError("a message has the role '{}'; choose system, user or assistant", printable(message.role));
  }
}

/// The text before the content of a message.
std::string head_of(ChatTemplate chat, std::string_view role) {
  switch (chat) {
    case ChatTemplate::ChatMl:
      return fmt::format("<|im_start|>{}\n", role);
    case ChatTemplate::Llama3:
      return fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", role);
    case ChatTemplate::Alpaca:
      return role == "system" ? "" : role == "user" ? "### Instruction:\n" : "### Response:\n";
  }
  return {};
}

/// The end of a message, and the text that only separates it from the next one.
std::pair<std::string, std::string> tail_of(ChatTemplate chat, std::string_view role) {
  if (chat == ChatTemplate::ChatMl) return {"<|im_end|>", "\n"};
  if (chat == ChatTemplate::Llama3) return {"<|eot_id|>", ""};
  return {"", role == "assistant" ? "" : "\n\n"};
}

std::vector<Segment> rendered(ChatTemplate chat, std::span<const Message> messages) {
  expect_roles(messages);
  std::vector<Segment> segments;
  const auto add = [&](const std::string& text, bool trained) {
    if (text.empty()) return;
    if (segments.empty() || segments.back().trained != trained) segments.push_back({"", trained});
    segments.back().text += text;
  };
  if (chat == ChatTemplate::Alpaca) {
    const bool has_system = messages.front().role == "system";
    const auto turns = messages.subspan(has_system ? 1 : 0);
    if (turns.empty() || turns.size() > 2 || turns.front().role != "user" || (turns.size() == 2 && turns.back().role != "assistant"))
      throw UsageError("the template alpaca writes one message of the user and one answer of the assistant");
    if (!has_system) add(kAlpacaTask, false);
  }
  if (chat == ChatTemplate::Llama3) add("<|begin_of_text|>", false);
  for (const auto& [role, content] : messages) {
    const bool trained = role == "assistant";
    const auto [end, between] = tail_of(chat, role);
    add(head_of(chat, role), false);
    add((chat == ChatTemplate::Llama3 ? trimmed(content) : content) + end, trained);
    add(between, false);
  }
  return segments;
}

}  // namespace

ChatTemplate chat_template_named(std::string_view name) {
  const auto* const found = std::ranges::find(kNames, name, [](const auto& pair) { return pair.first; });
  if (found != kNames.end()) return found->second;
  std::vector<std::string_view> known;
  for (const auto& [each, chat] : kNames) known.push_back(each);
  throw ConfigError("there is no chat template '{}'; choose one of {}", printable(std::string(name)), joined(known));
}

std::vector<Segment> render(ChatTemplate chat, std::span<const Message> messages) {
  auto segments = rendered(chat, messages);
  if (std::ranges::none_of(segments, &Segment::trained))
    throw UsageError("a conversation has no message of the assistant, so nothing to learn");
  return segments;
}

std::string prompt_of(ChatTemplate chat, std::span<const Message> messages) {
  std::string text;
  for (const auto& segment : rendered(chat, messages)) text += segment.text;
  return text + head_of(chat, "assistant");
}

std::span<const std::string_view> marks_of(ChatTemplate chat) {
  static constexpr std::string_view kChatMl[] = {"<|im_start|>", "<|im_end|>"};
  static constexpr std::string_view kLlama3[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
  if (chat == ChatTemplate::Alpaca) return {};
  return chat == ChatTemplate::ChatMl ? std::span<const std::string_view>(kChatMl) : kLlama3;
}

std::string_view end_of_turn(ChatTemplate chat) {
  return chat == ChatTemplate::ChatMl ? "<|im_end|>" : chat == ChatTemplate::Llama3 ? "<|eot_id|>" : "";
}

}  // namespace tessera::llm
