#include "tessera/llm/chat.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"

namespace tessera::llm {
namespace {

constexpr std::string_view kMarksOfChatMl[] = {"<|im_start|>", "<|im_end|>"};
constexpr std::string_view kMarksOfLlama3[] = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};

/// A template that writes the role of each message in the same way; Alpaca has its own words for each role.
struct Style {
  std::string_view name, begin, before_role, after_role;
  std::string_view end, between;  // the end of a message, and the separator between it and the next one
  std::span<const std::string_view> marks;
};
constexpr Style kStyles[] = {
    {"chatml", "", "<|im_start|>", "\n", "<|im_end|>", "\n", kMarksOfChatMl},
    {"llama3", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", kMarksOfLlama3},
    {"alpaca", "", "", "", "", "\n\n", {}},
};
constexpr auto kAlpacaTask =
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n";

/// Returns the text as Python's str.strip leaves it, which the template of Llama 3 calls.
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

const Style& style_of(ChatTemplate chat) {
  return kStyles[static_cast<size_t>(chat)];
}

/// The text before the content of a message.
std::string head_of(ChatTemplate chat, std::string_view role) {
  const auto& style = style_of(chat);
  if (chat != ChatTemplate::Alpaca) return fmt::format("{}{}{}", style.before_role, role, style.after_role);
  return role == "system" ? "" : role == "user" ? "### Instruction:\n" : "### Response:\n";
}

std::vector<Segment> rendered(ChatTemplate chat, std::span<const Message> messages) {
  expect_roles(messages);
  std::vector<Segment> segments;
  const auto add = [&](std::string_view text, bool trained) {
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
  const auto& style = style_of(chat);
  add(style.begin, false);
  for (const auto& [role, content] : messages) {
    const bool trained = role == "assistant";
    add(head_of(chat, role), false);
    add(fmt::format("{}{}", chat == ChatTemplate::Llama3 ? trimmed(content) : content, style.end), trained);
    if (!trained || chat != ChatTemplate::Alpaca) add(style.between, false);
  }
  return segments;
}

}  // namespace

ChatTemplate chat_template_named(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& style : kStyles) {
    if (style.name == name) return static_cast<ChatTemplate>(&style - kStyles);
    known.push_back(style.name);
  }
  throw ConfigError("there is no chat template '{}'; choose one of {}", printable(name), joined(known));
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
  return style_of(chat).marks;
}

std::string_view end_of_turn(ChatTemplate chat) {
  return style_of(chat).end;
}

}  // namespace tessera::llm
