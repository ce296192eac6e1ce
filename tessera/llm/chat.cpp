#include "tessera/llm/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/llm/jinja.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using Json = ChatTemplate::Json;

constexpr auto kText = "chat_template";

constexpr std::string_view kCheck = R"({% for m in messages %}
{% if m.role not in ['system', 'user', 'assistant'] %}
{{ raise_exception("a message has the role '" ~ m.role ~ "'; choose system, user or assistant") }}
{% elif m.tool_calls or m.content is not string %}
{{ raise_exception('it has tool calls, which only templates of models write; leave --chat out, or give a file') }}
{% endif %}{% endfor %})";

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

/// The special tokens of a model, and its template.
Json description_of(const fs::path& model) {
  auto found = Json::object();
  if (!is_folder(model)) {
    const checkpoint::GgufFile file(model);
    const auto* tokens = file.texts("tokenizer.ggml.tokens");
    for (const auto& [name, key] :
         {std::pair{"bos_token", "bos"}, {"eos_token", "eos"}, {"unk_token", "unknown"}, {"pad_token", "padding"}}) {
      const auto id = file.integer(fmt::format("tokenizer.ggml.{}_token_id", key));
      if (tokens != nullptr && id && *id >= 0 && *id < std::ssize(*tokens)) found[name] = (*tokens)[static_cast<size_t>(*id)];
    }
    if (const auto text = file.text("tokenizer.chat_template")) found[kText] = *text;
    return found;
  }
  for (const auto* name : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const auto file = model / name;
    if (!is_there(file)) continue;
    const auto json = Json::parse(InputFile(file).read_all(), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", file);
    for (const auto& [key, value] : json.items()) {
      const auto text = value.is_object() ? value.value("content", Json()) : value;
      if (key.ends_with("_token") && text.is_string()) found[key] = text;
    }
    auto text = json.value(kText, Json());
    for (const auto& each : text.is_array() ? text : Json::array()) {
      if (each.is_object() && each.value("name", Json()) == "default") found[kText] = each.value("template", Json());
    }
    if (text.is_string()) found[kText] = text;
  }
  if (const auto file = model / "chat_template.jinja"; is_there(file)) found[kText] = InputFile(file).read_all();
  return found;
}

/// Messages as templates read them: arguments of tools as objects, where `objects`, and parts of contents as one text, unless `parts`.
/// Throws UsageError for a message that no template writes.
Json prepared(const Json& messages, bool parts, bool objects) {
  if (!messages.is_array()) throw UsageError("messages is not a list");
  if (messages.empty()) throw UsageError("a conversation has no messages");
  auto out = messages;
  for (size_t i = 0; i < out.size(); i++) {
    const auto refuse = [&](std::string_view why) { throw UsageError("message {} {}", i + 1, why); };
    auto& message = out[i];
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) refuse("has no role");
    const bool calls = message.value("tool_calls", Json()).is_array() && !message["tool_calls"].empty();
    const auto content = message.value("content", Json());
    if (!message.contains("content") && !calls) refuse("has no content");
    if (!content.is_string() && !content.is_array() && !(content.is_null() && calls))
      refuse(fmt::format("has a content that is {}, and not text", content.type_name()));
    std::string text;
    for (const auto& part : content.is_array() ? content : Json::array()) {
      if (!part.is_object() || part.value("type", Json("text")) != "text" || !part.value("text", Json()).is_string())
        refuse("has a part of its content that is not a text: " + printable(part.dump()).substr(0, 80));
      text += part["text"].get_ref<const std::string&>();
    }
    if (content.is_array() && !parts) message["content"] = text;
    if (!calls || !objects) continue;
    for (auto& call : message["tool_calls"]) {
      auto& function = call.is_object() && call.contains("function") ? call["function"] : call;
      if (!function.is_object() || !function.contains("arguments") || !function["arguments"].is_string()) continue;
      const auto parsed = Json::parse(function["arguments"].get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
      if (parsed.is_object()) function["arguments"] = parsed;
    }
  }
  return out;
}

}  // namespace

struct ChatTemplate::Inside {
  /// `described`: bos_token and so on, and the template's text.
  explicit Inside(Json described, bool named = false) : description(std::move(described)), chat(text()), named(named) {
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
  jinja::Rendered rendered(const Json& messages, const Json* tools, bool prompt) const {
    auto variables = description;
    variables["tools"] = tools == nullptr || tools->empty() ? Json() : *tools;
    variables["documents"] = nullptr;
    variables["add_generation_prompt"] = prompt;
    variables["messages"] = prepared(messages, reads_parts, true);
    try {
      return chat.render(variables);
    } catch (const UsageError&) {
      auto others = prepared(messages, reads_parts, false);  // some templates take arguments of tools only as texts
      if (others == variables["messages"]) throw;
      variables["messages"] = std::move(others);
      return chat.render(variables);
    }
  }
  std::vector<jinja::Range> answers(const Json& messages, const Json* tools, const jinja::Rendered& whole, size_t from) const;

  Json description;
  jinja::Template chat;
  bool named, reads_parts = true;
};

ChatTemplate ChatTemplate::named(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [each, text] : kNamed) {
    known.push_back(each);
    if (each != name) continue;
    return ChatTemplate(std::make_shared<Inside>(Json{{kText, fmt::format("{}{}", kCheck, text)}}, true));
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
  auto described = description_of(model);
  if (from != model) described[kText] = InputFile(from).read_all();
  if (!described.value(kText, Json()).is_string()) return {};
  try {
    return ChatTemplate(std::make_shared<Inside>(std::move(described)));
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(from.string() + ": "));
  }
}

std::string ChatTemplate::prompt(const Json& messages, const Json* tools) const {
  return inside_->rendered(messages, tools, true).text;
}

std::vector<jinja::Range> ChatTemplate::Inside::answers(const Json& messages, const Json* tools, const jinja::Rendered& whole,
                                                        size_t from) const {
  std::vector<jinja::Range> found;
  const auto is_answer = [](const Json& message) { return message["role"] == "assistant"; };
  const auto answer = std::find_if(messages.begin(), messages.end(), is_answer);
  const auto first = static_cast<size_t>(answer - messages.begin());
  // `head` is how the template begins any answer. Some templates write it after the last message even if not asked to.
  const std::string_view text = whole.text;
  const bool within = first > 0 && first < messages.size();
  const Json before = within ? Json(Json::array_t(messages.begin(), answer)) : messages;
  const auto open = rendered(before, tools, true).text, closed = rendered(before, tools, false).text;
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
    if (turns.empty()) continue;
    if (turns.size() > 1 || turns.front().begin < end)
      throw UsageError(
          "the chat template writes message {} in several places, so its answers can't be told; put them into {{% generation %}}", i + 1);
    end = turns.front().end;
    if (!is_answer(messages[i]) || i < from) continue;
    auto [begin, last] = turns.front();
    if (i + 1 == messages.size() && (head.empty() || text.find(head, last) == std::string::npos)) last = text.size();
    begin += begins(text.substr(begin, last - begin));
    found.push_back({begin, begin + text.substr(begin, last - begin).find_last_not_of(" \t\r\n") + 1});
  }
  if (end == 0)
    throw UsageError(
        "the chat template does not write messages one by one, so its answers can't be told; put them into {{% generation %}}");
  return found;
}

std::vector<Segment> ChatTemplate::render(const Json& messages, const Json* tools, size_t learned_from) const {
  const auto whole = inside_->rendered(messages, tools, false);
  auto learned = whole.generated;
  if (learned.empty()) {
    learned = inside_->answers(messages, tools, whole, learned_from);
  } else if (learned_from >= whole.turns.size()) {
    learned.clear();
  } else if (learned_from > 0) {
    const auto& turns = whole.turns[learned_from];
    std::erase_if(learned, [&](const jinja::Range& range) { return !turns.empty() && range.begin < turns.front().begin; });
  }
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
    throw UsageError("a conversation has no message of the assistant, so nothing to learn");
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
