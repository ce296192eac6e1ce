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

/// Returns the calls of tools in LLaMA-Factory's data: {"name", "arguments"}, or a list of these.
Json calls_of(const std::string& text) {
  auto given = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (given.is_object()) given = Json::array({given});
  auto calls = Json::array();
  for (const auto& call : given.is_array() ? given : Json::array()) {
    if (call.is_object() && call.contains("name")) calls.push_back({{"type", "function"}, {"function", call}});
  }
  if (calls.empty() || calls.size() != given.size()) throw UsageError("a function_call is not JSON with name and arguments");
  return calls;
}

/// Changes a message of ShareGPT, {"from", "value"}, and the older form of OpenAI's calls to {"role", "content", "tool_calls"}.
void convert(Json& message, size_t number) {
  static const std::map<std::string, std::string> roles = {
      {"human", "user"}, {"gpt", "assistant"},       {"chatgpt", "assistant"}, {"model", "assistant"},         {"bot", "assistant"},
      {"user", "user"},  {"assistant", "assistant"}, {"system", "system"},     {"function_call", "assistant"}, {"observation", "tool"},
      {"tool", "tool"}};
  if (!message.is_object()) return;
  if (const auto call = message.value("function_call", Json()); call.is_object()) {
    message["tool_calls"] = Json::array({{{"type", "function"}, {"function", call}}});
    message.erase("function_call");
  }
  if (!message.contains("from")) return;
  const auto from = text_in(message, "from");
  const auto role = roles.find(from);
  if (role == roles.end())
    throw UsageError("message {} is from '{}'; write human, gpt, system, function_call or observation", number, printable(from));
  message["role"] = role->second;
  message["content"] = message.value("value", message.value("content", Json()));
  message.erase("from");
  message.erase("value");
  if (from != "function_call") return;
  message["tool_calls"] = calls_of(text_in(message, "content"));
  message["content"] = "";
}

/// Returns messages behind those that come before: of a list, of one message, or of a text from the given role if there is one.
Json messages_in(const Json& line, const char* key, const std::string& role, Json before = Json::array()) {
  const auto& value = line.at(key);
  if (value.is_array()) {
    before.insert(before.end(), value.begin(), value.end());
  } else {
    if (!value.is_object() && (role.empty() || !value.is_string()))
      throw UsageError("{} is {}not a list of messages", key, role.empty() ? "" : "not a text, and ");
    before.push_back(value.is_string() ? message_from(role, value.get<std::string>()) : value);
  }
  for (size_t i = 0; i < before.size(); i++) convert(before[i], i + 1);
  return before;
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

bool has(const Json& line, const char* key) {
  return line.contains(key) && !line[key].is_null();
}

/// The answer under `key` to a prompt, which may have any of the forms.
Document answered(const Json& line, const char* key, const ChatTemplate* chat) {
  if (has(line, "prompt") && line["prompt"].is_string() && line[key].is_string())
    return {.segments = {{text_in(line, "prompt"), false}, {text_in(line, key), true}}};
  const auto prompt = has(line, "prompt")          ? messages_in(line, "prompt", "user")
                      : has(line, "conversations") ? messages_in(line, "conversations", "", begun(line))
                      : has(line, "instruction")   ? alpaca(line)
                                                   : throw UsageError("it has {}, but no prompt", key);
  const auto before = prompt.size();
  return conversation(line, messages_in(line, key, "assistant", prompt), before, chat);
}

std::vector<Document> pair_in(const Json& line, const ChatTemplate* chat) {
  const bool lists = line["chosen"].is_array() && line["rejected"].is_array(), prompt = has(line, "prompt");
  // Without a prompt of messages, it is the messages with which both begin.
  if (lists && !has(line, "conversations") && !(prompt && line["prompt"].is_array())) {
    const auto chosen = messages_in(line, "chosen", "assistant"), rejected = messages_in(line, "rejected", "assistant");
    size_t shared = 0;
    while (shared < std::min(chosen.size(), rejected.size()) && chosen[shared] == rejected[shared]) shared++;
    for (const auto* each : {&chosen, &rejected}) {
      if (shared < each->size() && each->at(shared).value("role", Json()) != "assistant")
        throw UsageError("chosen and rejected differ in message {}, which is not an answer; both must begin with the same prompt",
                         shared + 1);
    }
    if (shared > 0 || !prompt) return {conversation(line, chosen, shared, chat), conversation(line, rejected, shared, chat)};
  }
  return {answered(line, "chosen", chat), answered(line, "rejected", chat)};
}

}  // namespace

std::vector<Document> documents_in(const Json& line, const ChatTemplate* chat) try {
  if (has(line, "chosen") && has(line, "rejected")) return pair_in(line, chat);
  if (has(line, "prompt") && has(line, "completion")) {
    if (line.value("label", Json()) == false)
      throw UsageError("its label is false: its completion is an example of a bad one, for KTO, which Tessera does not have; leave it out");
    return {answered(line, "completion", chat)};
  }
  if (has(line, "messages")) return {conversation(line, messages_in(line, "messages", ""), 0, chat)};
  if (has(line, "conversations")) return {conversation(line, messages_in(line, "conversations", "", begun(line)), 0, chat)};
  if (has(line, "instruction") && has(line, "output"))
    return {conversation(line, messages_in(line, "output", "assistant", alpaca(line)), 0, chat)};
  if (has(line, "text")) return {{.segments = {{text_in(line, "text"), true}}}};
  std::string keys;
  for (const auto& [key, value] : line.items())
    keys += fmt::format("{}{}{}", keys.empty() ? "" : ", ", printable(key), value.is_null() ? " (null)" : "");
  throw UsageError("it has {}, but neither text, nor prompt and completion, nor messages; give the text to learn under the key \"text\"",
                   keys.empty() ? "no keys" : keys);
} catch (const Json::exception& error) {
  throw UsageError("a value in it has another type than its key needs: {}", error.what());
}

}  // namespace tessera::llm
