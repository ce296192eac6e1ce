#include "tessera/llm/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/llm/jinja.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using Json = ChatTemplate::Json;

constexpr auto kText = "chat_template";
constexpr std::array<std::string_view, 4> kRoles = {"system", "user", "assistant", "tool"};

constexpr std::pair<std::string_view, std::string_view> kNamed[] = {
    {"chatml", R"({% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}
{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})"},
    {"llama3", R"({{ '<|begin_of_text|>' }}
{%- for m in messages %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content|trim ~ '<|eot_id|>' }}{% endgeneration %}
{% else %}{{ m.content|trim ~ '<|eot_id|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"},
    {"alpaca", R"({% set turns = messages[1:] if messages[0].role == 'system' else messages %}
{% if turns|map(attribute='role')|join(' ') not in ['user', 'user assistant'] %}
{{ raise_exception('the template alpaca writes one message of the user and one answer of the assistant') }}{% endif %}
{% set user = turns[0] %}
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{%- elif user.input %}{{ 'Below is an instruction that describes a task, paired with an input that provides further context. '
 ~ 'Write a response that appropriately completes the request.' }}
{%- else %}{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}{% endif %}
{{ '\n\n### Instruction:\n' ~ (user.instruction or user.content) ~ ('\n\n### Input:\n' ~ user.input if user.input else '') ~ '\n\n' }}
{%- if turns|length > 1 or add_generation_prompt %}{{ '### Response:\n' }}{% endif %}
{% if turns|length > 1 %}{% generation %}{{ turns[1].content }}{% endgeneration %}{% endif %})"}};

/// The special tokens of a model and the text of its template, which `place` has.
struct Described {
  Json values = Json::object();
  fs::path place;
};

Described description_of(const fs::path& model) {
  Described found{.place = model};
  if (!is_folder(model)) {
    const checkpoint::GgufFile file(model);
    const auto* tokens = file.texts("tokenizer.ggml.tokens");
    for (const auto& [name, key] :
         {std::pair{"bos_token", "bos"}, {"eos_token", "eos"}, {"unk_token", "unknown"}, {"pad_token", "padding"}}) {
      const auto id = file.integer(fmt::format("tokenizer.ggml.{}_token_id", key));
      if (tokens != nullptr && id && *id >= 0 && *id < std::ssize(*tokens)) found.values[name] = (*tokens)[static_cast<size_t>(*id)];
    }
    if (const auto text = file.text("tokenizer.chat_template")) found.values[kText] = *text;
    return found;
  }
  constexpr std::string_view kRead[] = {"special_tokens_map.json", data::kTokenizerConfig, data::kChatTemplateFile};
  const auto files = data::files_in(model, kRead);
  for (const auto name : {kRead[0], kRead[1]}) {
    const auto file = files.find(std::string(name));
    if (file == files.end()) continue;
    const auto json = Json::parse(file->second, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", model / name);
    for (const auto& [key, value] : json.items()) {
      const auto text = value.is_object() ? value.value("content", Json()) : value;
      if (key.ends_with("_token") && text.is_string()) found.values[key] = text;
    }
  }
  if (const auto [text, name] = data::chat_template_in(files); !text.empty()) {
    found.values[kText] = text;
    found.place /= name;
  }
  return found;
}

/// How messages are written that templates want in different ways.
struct Form {
  bool objects;  // whether arguments of tools are objects, or as they are given
  Json empty;    // the content where there is none, "" or null; as it is given if discarded
};

/// The calls of tools in a message.
Json calls_in(const Json& message) {
  auto calls = message.value("tool_calls", Json());
  return calls.is_array() ? calls : Json::array();
}

auto& function_of(auto& call) {
  return call.is_object() && call.contains("function") ? call["function"] : call;
}

/// The number of the first message with a call that a text lacks; the number of messages if there is none.
size_t first_without_calls(const Json& messages, const jinja::Rendered& whole) {
  size_t i = 0;
  for (; i < messages.size(); i++) {
    const auto& turns = whole.turns[i];
    const auto begin = turns.empty() ? 0 : turns.front().begin, end = turns.empty() ? whole.text.size() : turns.back().end;
    const auto written = std::string_view(whole.text).substr(begin, end - begin);
    for (const auto& call : calls_in(messages[i])) {
      const auto& function = function_of(call);
      const auto name = function.is_object() ? function.value("name", Json()) : Json();
      if (!name.is_string() || written.find(name.get_ref<const std::string&>()) == std::string_view::npos) return i;
    }
  }
  return i;
}

}  // namespace

struct ChatTemplate::Inside {
  /// `described`: bos_token and so on, and the template's text. Errors call the template by its name.
  Inside(Json described, std::string name) : description(std::move(described)), name(std::move(name)), chat(text()) {
    try {
      const auto probe = Json::parse(R"([{"role": "user", "content": [{"type": "text", "text": "probe"}]}])");
      const auto seen = rendered(probe, nullptr, false).text;
      const auto at = seen.find("probe");
      reads_parts = at != std::string::npos && seen.compare(at + 5, 1, "'") != 0 && seen.compare(at + 5, 1, "\"") != 0;
    } catch (const UsageError&) {
      reads_parts = false;
    }
  }

  const std::string& text() const { return description[kText].get_ref<const std::string&>(); }
  bool has(const std::string& word) const { return text().find(word) != std::string::npos; }
  Json prepared(const Json& messages, const Form& form) const;
  jinja::Rendered rendered(const Json& messages, const Json* given, bool prompt) const;
  std::vector<jinja::Range> answers(const Json& messages, const Json* variables, const jinja::Rendered& whole) const;

  Json description;
  std::string name;
  jinja::Template chat;
  bool named = false, reads_parts = true;
};

/// Messages as the template reads them. Throws UsageError for a message that no template writes.
Json ChatTemplate::Inside::prepared(const Json& messages, const Form& form) const {
  if (!messages.is_array()) throw UsageError("messages is not a list");
  if (messages.empty()) throw UsageError("a conversation has no messages");
  auto out = messages;
  for (size_t i = 0; i < out.size(); i++) {
    const auto refuse = [&](std::string_view why) { throw UsageError("message {} {}", i + 1, why); };
    auto& message = out[i];
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) refuse("has no role");
    const auto& role = message["role"].get_ref<const std::string&>();
    if (std::ranges::find(kRoles, role) == std::end(kRoles) && !has("'" + role + "'") && !has('"' + role + '"'))
      refuse(fmt::format("has the role '{}', which {} does not name; choose one of {}", printable(role), name, joined(kRoles)));
    const auto content = message.value("content", Json());
    const bool calls = !calls_in(message).empty();
    if (content.is_null()) {
      bool others = calls;  // or thoughts, under a key that the template reads
      for (const auto& [key, value] : message.items())
        others = others || (key != "role" && key != "content" && !value.is_null() && has(key));
      if (!others) refuse(message.contains("content") ? "has a content that is null, and not text" : "has no content");
    } else if (!content.is_string() && !content.is_array()) {
      refuse(fmt::format("has a content that is {}, and not text", content.type_name()));
    }
    std::string text;
    for (const auto& part : content.is_array() ? content : Json::array()) {
      if (!part.is_object() || part.value("type", Json("text")) != "text" || !part.value("text", Json()).is_string())
        refuse("has a part of its content that is not a text: " + printable(part.dump()).substr(0, 80));
      text += part["text"].get_ref<const std::string&>();
    }
    if (content.is_array() && !reads_parts) message["content"] = text;
    if (form.empty.is_string() ? content.is_null() : form.empty.is_null() && calls && content == "") message["content"] = form.empty;
    if (!calls || !form.objects) continue;
    for (auto& call : message["tool_calls"]) {
      auto& function = function_of(call);
      if (!function.is_object() || !function.contains("arguments") || !function["arguments"].is_string()) continue;
      if (function["arguments"] == "") continue;  // a call without arguments
      const auto parsed = Json::parse(function["arguments"].get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
      if (parsed.is_discarded()) refuse("has a tool call whose arguments are not JSON");
      if (parsed.is_object()) function["arguments"] = parsed;
    }
  }
  return out;
}

jinja::Rendered ChatTemplate::Inside::rendered(const Json& messages, const Json* given, bool prompt) const {
  auto variables = description;
  variables.update({{"tools", nullptr}, {"documents", nullptr}});
  if (given != nullptr) variables.update(*given);
  if (variables["tools"].empty()) variables["tools"] = nullptr;
  variables["add_generation_prompt"] = prompt;
  std::exception_ptr failure;
  for (const bool objects : {true, false}) {
    for (const auto& empty : {Json(Json::value_t::discarded), Json(""), Json()}) {
      auto own = prepared(messages, {objects, empty});
      if (own == variables["messages"]) continue;
      variables["messages"] = std::move(own);
      try {
        auto whole = chat.render(variables);
        const auto without = first_without_calls(messages, whole);
        if (without == messages.size()) return whole;
        failure = std::make_exception_ptr(
            UsageError("message {} has tool calls, which {} does not write; choose another template with --chat, or write them as text",
                       without + 1, name));
      } catch (const UsageError&) {
        if (!failure) failure = with_context(name + ", ");
      }
    }
  }
  std::rethrow_exception(failure);
}

ChatTemplate ChatTemplate::named(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [each, text] : kNamed) {
    known.push_back(each);
    if (each != name) continue;
    const auto inside = std::make_shared<Inside>(Json{{kText, text}}, fmt::format("the chat template {}", name));
    inside->named = true;
    return ChatTemplate(inside);
  }
  throw ConfigError("there is no chat template '{}'; choose one of {}", printable(name), joined(known));
}

std::optional<ChatTemplate> ChatTemplate::found_in(const fs::path& model) {
  return made(model, model);
}

ChatTemplate ChatTemplate::of(const fs::path& model, const fs::path& file) {
  if (auto found = made(model, file.empty() ? model : file)) return *std::move(found);
  throw ConfigError("{} has no chat template; choose chatml, llama3 or alpaca, or give a file .jinja", model);
}

std::optional<ChatTemplate> ChatTemplate::made(const fs::path& model, const fs::path& from) {
  auto [values, place] = description_of(model);
  if (from != model) values[kText] = InputFile(place = from).read_all();
  if (!values.contains(kText)) return {};
  const auto name = fmt::format("the chat template in {}", place.string());
  try {
    return ChatTemplate(std::make_shared<Inside>(std::move(values), name));
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(name + ", "));
  }
}

std::string ChatTemplate::prompt(const Json& messages, const Json* variables) const {
  return inside_->rendered(messages, variables, true).text;
}

std::vector<jinja::Range> ChatTemplate::Inside::answers(const Json& messages, const Json* variables, const jinja::Rendered& whole) const {
  std::vector<jinja::Range> found;
  const auto is_answer = [](const Json& message) { return message["role"] == "assistant"; };
  const auto answer = std::find_if(messages.begin(), messages.end(), is_answer);
  const auto first = static_cast<size_t>(answer - messages.begin());
  // `head` is how the template begins any answer. Some templates write it after the last message even if not asked to.
  const std::string_view text = whole.text;
  const bool within = first > 0 && first < messages.size();
  const Json before = within ? Json(Json::array_t(messages.begin(), answer)) : messages;
  const auto open = rendered(before, variables, true).text, closed = rendered(before, variables, false).text;
  const auto turn = within && !whole.turns[first].empty() ? whole.turns[first].front() : jinja::Range{};
  const bool begun = turn.end > 0 && open.starts_with(text.substr(0, turn.begin));
  auto head =
      std::string_view(open).substr(begun ? turn.begin : static_cast<size_t>(std::ranges::mismatch(open, closed).in1 - open.begin()));
  /// How much of a turn is this beginning: all of it, or whole marks and lines of it, such as those before an open <think>.
  const auto begins = [&](std::string_view written) {
    if (const auto at = written.find(head); at != std::string::npos) return at + head.size();
    const auto common = written.substr(0, static_cast<size_t>(std::ranges::mismatch(written, head).in1 - written.begin()));
    return common.find_last_of(">]\n ") + 1;
  };
  if (begun && open == closed && begins(text.substr(turn.begin, turn.end - turn.begin)) == 0) head = {};  // it is the end of any text
  size_t end = 0;
  for (size_t i = 0; i < messages.size(); i++) {
    const auto& turns = whole.turns[i];
    if (turns.empty() && messages[i]["role"] == "tool")
      throw UsageError("{} does not write message {} in a turn of its own, so it can't be told from answers; put these into {{% generation %}}",
                       name, i + 1);
    if (turns.empty()) continue;
    if (turns.size() > 1 || turns.front().begin < end)
      throw UsageError("{} writes message {} in several places, so its answers can't be told; put them into {{% generation %}}", name,
                       i + 1);
    end = turns.front().end;
    if (!is_answer(messages[i])) continue;
    auto [begin, last] = turns.front();
    if (i + 1 == messages.size() && (head.empty() || text.find(head, last) == std::string::npos)) last = text.size();
    begin += begins(text.substr(begin, last - begin));
    found.push_back({begin, begin + text.substr(begin, last - begin).find_last_not_of(" \t\r\n") + 1});
  }
  if (end == 0)
    throw UsageError("{} does not write messages one by one, so its answers can't be told; put them into {{% generation %}}", name);
  return found;
}

std::vector<Segment> ChatTemplate::render(const Json& messages, const Json* variables, size_t learned_from) const {
  const auto whole = inside_->rendered(messages, variables, false);
  auto learned = whole.generated.empty() ? inside_->answers(messages, variables, whole) : whole.generated;
  std::vector<bool> counts;
  size_t answers = 0, counted = 0;
  for (const auto& message : messages) {
    const auto weight = message.value("weight", Json());
    if (!weight.is_null() && weight != 0 && weight != 1) throw UsageError("message {} has a weight that is neither 0 nor 1", counts.size() + 1);
    counts.push_back(counts.size() >= learned_from && weight != 0);
    if (message["role"] != "assistant") continue;
    answers++;
    counted += counts.back() ? 1 : 0;
  }
  std::erase_if(learned, [&](const jinja::Range& range) {
    for (size_t i = 0; i < counts.size(); i++) {
      for (const auto& turn : whole.turns[i]) {
        if (turn.begin <= range.begin && range.begin < turn.end) return !counts[i];
      }
    }
    if (counted != 0 && counted != answers)
      throw UsageError("{} does not write messages one by one, so the answers that are learned can't be told from others", inside_->name);
    return counted == 0;
  });
  std::vector<Segment> segments;
  size_t at = 0;
  const auto add = [&](size_t end, bool trained) {
    if (end > at) segments.push_back({whole.text.substr(at, end - at), trained});
    at = end;
  };
  for (const auto& [begin, end] : learned) {
    add(begin, false);
    add(end, true);
  }
  add(whole.text.size(), false);
  if (std::ranges::none_of(segments, &Segment::trained))
    throw UsageError("there is nothing to learn: a conversation needs a message of the assistant, behind its prompt and without \"weight\": 0");
  return segments;
}

std::string ChatTemplate::description() const {
  return inside_->description.dump();
}

bool ChatTemplate::is_bare() const {
  return inside_->named && marks().empty();
}

std::vector<std::string> ChatTemplate::marks() const {
  std::vector<std::string> marks;
  const auto& text = inside_->text();
  for (size_t at = 0; inside_->named && (at = text.find("<|", at)) != std::string::npos; at++)
    marks.push_back(text.substr(at, text.find("|>", at) + 2 - at));
  return marks;
}

}  // namespace tessera::llm
