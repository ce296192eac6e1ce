#include "tessera/llm/lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::llm {
namespace {

using Json = nlohmann::ordered_json;

bool has(const Json& line, const char* key) {
  return line.contains(key) && !line[key].is_null();
}

std::string text_in(const Json& line, const char* key) {
  const auto& value = line.at(key);
  if (!value.is_string()) throw UsageError("{} is not a text", key);
  return value.get<std::string>();
}

std::string text_if_any(const Json& line, const char* key) {
  return has(line, key) ? text_in(line, key) : "";
}

Json message_from(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

/// The system prompt beside the messages under `key`, unless they begin with one of their own.
Json begun(const Json& line, const char* key) {
  auto messages = Json::array();
  const auto first = line[key].is_array() && !line[key].empty() && line[key][0].is_object() ? line[key][0] : Json::object();
  const bool has_own = first.value("role", Json()) == "system" || first.value("from", Json()) == "system";
  if (const auto system = text_if_any(line, "system"); !system.empty() && !has_own) messages.push_back(message_from("system", system));
  return messages;
}

/// Returns the calls of tools in LLaMA-Factory's data: {"name", "arguments"}, or a list of these.
Json calls_of(const std::string& text, size_t number) {
  auto given = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (given.is_object()) given = Json::array({given});
  auto calls = Json::array();
  for (const auto& call : given.is_array() ? given : Json::array()) {
    if (call.is_object() && call.contains("name")) calls.push_back({{"type", "function"}, {"function", call}});
  }
  if (calls.empty() || calls.size() != given.size()) throw UsageError("message {}: its function_call is not JSON with a name", number);
  return calls;
}

/// Changes a message of ShareGPT, {"from", "value"}, and the older form of OpenAI's calls to {"role", "content", "tool_calls"}.
void convert(Json& message, size_t number) {
  static const std::map<std::string, std::string> roles = {{"human", "user"},         {"gpt", "assistant"},   {"chatgpt", "assistant"},
                                                           {"model", "assistant"},    {"bot", "assistant"},   {"function_call", "assistant"},
                                                           {"observation", "tool"},   {"user", "user"},       {"assistant", "assistant"},
                                                           {"system", "system"},      {"tool", "tool"}};
  if (!message.is_object()) throw UsageError("message {} is not an object with role and content", number);
  if (has(message, "function_call")) {
    if (!message["function_call"].is_object() || has(message, "tool_calls"))
      throw UsageError("message {}: function_call must be an object, and not beside tool_calls", number);
    message["tool_calls"] = Json::array({{{"type", "function"}, {"function", message["function_call"]}}});
    message.erase("function_call");
  }
  if (message.value("role", Json()) == "function") message["role"] = "tool";
  if (!has(message, "from")) return;
  const auto from = text_in(message, "from");
  const auto role = roles.find(from);
  if (role == roles.end())
    throw UsageError("message {} is from '{}'; write human, gpt, system, function_call or observation", number, printable(from));
  message["role"] = role->second;
  message["content"] = has(message, "value") ? message["value"] : message.value("content", Json());
  message.erase("from");
  message.erase("value");
  if (from != "function_call") return;
  message["tool_calls"] = calls_of(text_in(message, "content"), number);
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
  auto messages = begun(line, "instruction");
  for (const auto& turn : has(line, "history") ? line["history"] : Json::array()) {
    if (!turn.is_array() || turn.size() != 2) throw UsageError("history is not a list of pairs of texts");
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
  auto variables = line.value("chat_template_kwargs", Json());
  if (!variables.is_null() && !variables.is_object()) throw UsageError("chat_template_kwargs is not an object");
  if (tools.is_array()) variables["tools"] = tools;
  return {.segments = chat->render(messages, variables.is_null() ? nullptr : &variables, learned_from), .by_template = !chat->is_bare()};
}

/// The answer under `key` to a prompt, which may have any of the forms.
Document answered(const Json& line, const char* key, const ChatTemplate* chat) {
  if (has(line, "prompt") && line["prompt"].is_string() && line[key].is_string())
    return {.segments = {{text_in(line, "prompt"), false}, {text_in(line, key), true}}};
  const auto prompt = has(line, "prompt")          ? messages_in(line, "prompt", "user")
                      : has(line, "conversations") ? messages_in(line, "conversations", "", begun(line, "conversations"))
                      : has(line, "instruction")   ? alpaca(line)
                                                   : throw UsageError("it has {}, but no prompt", key);
  const auto before = prompt.size();
  return conversation(line, messages_in(line, key, "assistant", prompt), before, chat);
}

std::vector<Document> pair_in(const Json& line, const ChatTemplate* chat) {
  const auto &one = line["chosen"], &other = line["rejected"];
  if (one.is_string() != other.is_string()) throw UsageError("one of chosen and rejected is a text, and the other is not");
  const bool text = has(line, "prompt") && line["prompt"].is_string();
  const bool none = !has(line, "prompt") && !has(line, "conversations") && !has(line, "instruction");
  if (none && one.is_string()) {
    // As in TRL, the prompt is the words with which both begin.
    const auto chosen = text_in(line, "chosen"), rejected = text_in(line, "rejected");
    auto shared = static_cast<size_t>(std::ranges::mismatch(chosen, rejected).in1 - chosen.begin());
    while (shared > 0 && chosen[shared - 1] != ' ' && chosen[shared - 1] != '\n') shared--;
    if (shared == 0) throw UsageError("it has chosen and rejected, but no prompt, and they do not begin with the same words");
    const Segment before{chosen.substr(0, shared), false};
    return {{.segments = {before, {chosen.substr(shared), true}}}, {.segments = {before, {rejected.substr(shared), true}}}};
  }
  // Without a prompt of messages, it is the messages with which both begin.
  if (one.is_array() && other.is_array() && (text || none)) {
    const auto chosen = messages_in(line, "chosen", "assistant"), rejected = messages_in(line, "rejected", "assistant");
    const auto same = [](const nlohmann::json& a, const nlohmann::json& b) { return a == b; };  // in whatever order their keys are
    size_t shared = 0;
    while (shared < std::min(chosen.size(), rejected.size()) && same(chosen[shared], rejected[shared])) shared++;
    for (const auto* each : {&chosen, &rejected}) {
      if (shared < each->size() && each->at(shared).value("role", Json()) != "assistant")
        throw UsageError("chosen and rejected differ in message {}, which is not an answer; both must begin with the same prompt",
                         shared + 1);
    }
    const bool is_in = std::ranges::any_of(std::span(chosen.get_ref<const Json::array_t&>()).first(shared), [&](const Json& message) {
      return none || message.value("content", Json()) == line["prompt"];
    });
    if (shared > 0 && !is_in) throw UsageError("its prompt is not among the messages with which chosen and rejected begin; leave one out");
    if (shared > 0 || none) return {conversation(line, chosen, shared, chat), conversation(line, rejected, shared, chat)};
  }
  return {answered(line, "chosen", chat), answered(line, "rejected", chat)};
}

}  // namespace

std::vector<Document> documents_in(const Json& line, const ChatTemplate* chat) try {
  if (has(line, "chosen") && has(line, "rejected")) return pair_in(line, chat);
  if (has(line, "prompt") && has(line, "completion")) {
    if (const auto label = line.value("label", Json()); label == false || label == 0)
      throw UsageError("its label says no: its completion is an example of a bad one, for KTO, which Tessera does not have; leave it out");
    return {answered(line, "completion", chat)};
  }
  if (has(line, "messages")) return {conversation(line, messages_in(line, "messages", "", begun(line, "messages")), 0, chat)};
  if (has(line, "conversations")) return {conversation(line, messages_in(line, "conversations", "", begun(line, "conversations")), 0, chat)};
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
