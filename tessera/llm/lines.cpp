#include "tessera/llm/lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::llm {
namespace {

using Json = nlohmann::ordered_json;

std::string text_in(const Json& line, const char* key) {
  const auto& value = line.at(key);
  if (!value.is_string()) throw UsageError("{} is not a text", key);
  return value.get<std::string>();
}

/// The text under a key that may be missing.
std::string text_if_any(const Json& line, const char* key) {
  return line.contains(key) && !line[key].is_null() ? text_in(line, key) : "";
}

Json message_from(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

Json begun(const Json& line) {
  auto messages = Json::array();
  if (const auto system = text_if_any(line, "system"); !system.empty()) messages.push_back(message_from("system", system));
  return messages;
}

/// Returns the calls of tools that a text is in LLaMA-Factory's data: {"name", "arguments"}, or a list of these; else an empty list.
Json calls_of(const std::string& text) {
  auto given = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (given.is_object()) given = Json::array({given});
  auto calls = Json::array();
  for (const auto& call : given.is_array() ? given : Json::array()) {
    if (!call.is_object() || !call.contains("name")) return Json::array();
    calls.push_back({{"type", "function"}, {"function", call}});
  }
  return calls;
}

Json sharegpt(const Json& line) {
  static const std::map<std::string, std::string> roles = {
      {"human", "user"}, {"gpt", "assistant"},       {"chatgpt", "assistant"}, {"model", "assistant"},         {"bot", "assistant"},
      {"user", "user"},  {"assistant", "assistant"}, {"system", "system"},     {"function_call", "assistant"}, {"observation", "tool"},
      {"tool", "tool"}};
  auto messages = begun(line);
  if (!line["conversations"].is_array()) throw UsageError("conversations is not a list");
  for (auto message : line["conversations"]) {
    if (message.is_object() && message.contains("from")) {
      const auto from = text_in(message, "from");
      const auto role = roles.find(from);
      if (role == roles.end())
        throw UsageError("message {} is from '{}'; write human, gpt, system, function_call or observation", messages.size() + 1,
                         printable(from));
      message["role"] = role->second;
      message["content"] = message.value("value", message.value("content", Json()));
      message.erase("from");
      message.erase("value");
      if (from == "function_call") {
        if (auto calls = calls_of(text_in(message, "content")); !calls.empty()) {
          message["content"] = "";
          message["tool_calls"] = std::move(calls);
        }
      }
    }
    messages.push_back(std::move(message));
  }
  return messages;
}

/// The template alpaca writes instruction and input apart.
Json alpaca(const Json& line) {
  auto messages = begun(line);
  for (const auto& turn : line.value("history", Json::array())) {
    messages.push_back(message_from("user", turn.at(0).get<std::string>()));
    messages.push_back(message_from("assistant", turn.at(1).get<std::string>()));
  }
  const auto instruction = text_in(line, "instruction"), input = text_if_any(line, "input");
  messages.push_back(message_from("user", input.empty() ? instruction : instruction + "\n" + input));
  messages.back()["instruction"] = instruction;
  messages.back()["input"] = input;
  messages.push_back(message_from("assistant", text_in(line, "output")));
  return messages;
}

Document conversation(const Json& line, const Json& messages, size_t learned_from, const ChatTemplate* chat) {
  if (chat == nullptr)
    throw UsageError(
        "it has messages, so it needs a chat template, and the tokenizer has none: give --chat chatml, llama3, alpaca or FILE.jinja");
  auto tools = line.value("tools", Json());
  if (tools.is_string() && !tools.get_ref<const std::string&>().empty())
    tools = Json::parse(tools.get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
  if (!tools.is_null() && !tools.is_array() && !tools.is_string()) throw UsageError("tools is not a list");
  return {.segments = chat->render(messages, tools.is_array() ? &tools : nullptr, learned_from), .by_template = !chat->is_bare()};
}

/// A prompt, and the answer to it under `key`: both texts, or both lists of messages.
Document answered(const Json& line, Json prompt, const char* key, const ChatTemplate* chat) {
  if (!line[key].is_array() && !prompt.is_array()) {
    if (!prompt.is_string()) throw UsageError("prompt is not a text");
    return {.segments = {{prompt.get<std::string>(), false}, {text_in(line, key), true}}};
  }
  if (!line[key].is_array()) throw UsageError("prompt is a list of messages, but {} is not", key);
  if (prompt.is_string()) prompt = Json::array({message_from("user", prompt.get<std::string>())});
  const auto before = prompt.size();
  for (const auto& message : line[key]) prompt.push_back(message);
  return conversation(line, prompt, before, chat);
}

std::vector<Document> pair_in(const Json& line, const ChatTemplate* chat) {
  const auto &chosen = line["chosen"], &rejected = line["rejected"];
  const bool lists = chosen.is_array() && rejected.is_array(), prompt = line.contains("prompt");
  // Without a prompt of messages, it is the messages with which both begin.
  if (lists && !(prompt && line["prompt"].is_array())) {
    size_t shared = 0;
    while (shared < std::min(chosen.size(), rejected.size()) && chosen[shared] == rejected[shared]) shared++;
    for (const auto* each : {&chosen, &rejected}) {
      if (shared < each->size() && each->at(shared).value("role", Json()) != "assistant")
        throw UsageError("chosen and rejected differ in message {}, which is not an answer; both must begin with the same prompt",
                         shared + 1);
    }
    if (shared > 0 || !prompt) return {conversation(line, chosen, shared, chat), conversation(line, rejected, shared, chat)};
  }
  if (!prompt) throw UsageError("it has chosen and rejected, but no prompt");
  return {answered(line, line["prompt"], "chosen", chat), answered(line, line["prompt"], "rejected", chat)};
}

}  // namespace

std::vector<Document> documents_in(const Json& line, const ChatTemplate* chat) try {
  const auto has = [&](const char* key) { return line.contains(key); };
  if (has("chosen") && has("rejected")) return pair_in(line, chat);
  if (has("prompt") && has("completion")) return {answered(line, line["prompt"], "completion", chat)};
  if (has("messages")) return {conversation(line, line["messages"], 0, chat)};
  if (has("conversations")) return {conversation(line, sharegpt(line), 0, chat)};
  if (has("instruction") && has("output")) return {conversation(line, alpaca(line), 0, chat)};
  if (has("text")) return {{.segments = {{text_in(line, "text"), true}}}};
  std::string keys;
  for (const auto& [key, value] : line.items()) keys += fmt::format("{}{}", keys.empty() ? "" : ", ", printable(key));
  throw UsageError("it has {}, but neither text, nor prompt and completion, nor messages; give the text to learn under the key \"text\"",
                   keys.empty() ? "no keys" : keys);
} catch (const Json::exception& error) {
  throw UsageError("a value in it has another type than its key needs: {}", error.what());
}

}  // namespace tessera::llm
