// Chat templates write what transformers writes, and tell what is learned.
#include "tessera/llm/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/llm/jinja.h"
#include "tessera/llm/lines.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::chat_test {
namespace {

using llm::ChatTemplate;
using Json = ChatTemplate::Json;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

Json messages_of(std::initializer_list<std::pair<const char*, const char*>> turns) {
  auto messages = Json::array();
  for (const auto& [role, content] : turns) messages.push_back({{"role", role}, {"content", content}});
  return messages;
}

/// The text of a conversation with what is learned in brackets.
std::string marked(const ChatTemplate& chat, const Json& messages, size_t from = 0) {
  std::string text;
  for (const auto& segment : chat.render(messages, nullptr, from)) text += segment.trained ? "[" + segment.text + "]" : segment.text;
  return text;
}

ChatTemplate template_of(const std::string& text) {
  const Folder folder;
  write_file(folder / "x.jinja", text);
  write_file(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}})");
  return ChatTemplate::of(folder.path(), folder / "x.jinja");
}

TEST(Chat, IsWrittenByItsTemplate) {
  const auto messages = messages_of({{"system", " s "}, {"user", "u"}, {"assistant", " a\n"}});
  EXPECT_EQ(marked(ChatTemplate::named("chatml"), messages),
            "<|im_start|>system\n s <|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n[ a\n<|im_end|>]\n");
  EXPECT_EQ(
      marked(ChatTemplate::named("llama3"), messages),
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n[a<|eot_id|>]");
  const auto blank = messages_of({{"user", "\u3000\u00A0\x0B u\u2003\x1C"}, {"assistant", "\u3000"}});
  EXPECT_THAT(marked(ChatTemplate::named("llama3"), blank), AllOf(HasSubstr("\n\nu<|eot_id|>"), HasSubstr("\n\n[<|eot_id|>]")));
  EXPECT_THAT(marked(ChatTemplate::named("alpaca"), messages_of({{"user", "u"}, {"assistant", " a\n"}})),
              HasSubstr("completes the request.\n\n### Instruction:\nu\n\n### Response:\n[ a\n]"));
  EXPECT_EQ(ChatTemplate::named("chatml").prompt(messages_of({{"system", " s "}, {"user", "u"}})),
            "<|im_start|>system\n s <|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THAT(message_of<ConfigError>([] { ChatTemplate::named("jinja"); }),
              HasSubstr("there is no chat template 'jinja'; choose one of chatml, llama3, alpaca"));
  EXPECT_THAT(message_of<UsageError>([&] {
                ChatTemplate::named("alpaca").prompt(messages_of({{"user", "a"}, {"user", "b"}}));
              }),
              HasSubstr("alpaca writes one message"));
}

TEST(Chat, IsLearnedFromTheBeginningOfAnAnswerToItsEnd) {
  const auto turns = messages_of({{"user", "q"}, {"assistant", " a "}, {"user", "r"}, {"assistant", "<think>\nt\n</think>\n\nb"}});
  // The end of a turn is learned, the line break after it is not.
  const auto zephyr = template_of(
      "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}\n"
      "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}");
  EXPECT_EQ(marked(zephyr, turns),
            "<|user|>\nq</s>\n<|assistant|>\n[ a </s>]\n<|user|>\nr</s>\n<|assistant|>\n[<think>\nt\n</think>\n\nb</s>]\n");
  EXPECT_THAT(marked(zephyr, turns, 2), AllOf(HasSubstr("\n a </s>"), HasSubstr("[<think>")));
  // Without a beginning of answers.
  const auto llama2 = template_of(
      "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
      "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}");
  EXPECT_THAT(marked(llama2, turns), AllOf(HasSubstr("<s>[INST] q [/INST][ a </s>]<s>[INST] r"), EndsWith("\n\nb </s>]")));
  // Thoughts of earlier answers are left out, as in Qwen 3, and the prompt opens them, as in DeepSeek R1.
  const auto thinks = template_of(
      "{% for m in messages %}{% set c = m.content if loop.last else m.content.split('</think>')[-1] %}"
      "{{ '<' + m.role + '>' + c.strip() + '<end>' }}{% endfor %}"
      "{% if add_generation_prompt %}<assistant><think>\n{% endif %}");
  EXPECT_EQ(marked(thinks, turns), "<user>q<end><assistant>[a<end>]<user>r<end><assistant><think>\n[t\n</think>\n\nb<end>]");
  // By the template's own marks.
  const auto own = template_of(
      "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% endif %}{% endfor %}");
  EXPECT_EQ(marked(own, messages_of({{"user", "q"}, {"assistant", "a"}, {"assistant", "b"}}), 2), "userassistantaassistant[b]");
  // The end of a text may follow after all messages.
  const auto late = template_of("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}");
  EXPECT_EQ(marked(late, messages_of({{"user", "q"}, {"assistant", "a"}})), "q[a</s>]");
  const auto twice = template_of("{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}");
  EXPECT_THAT(message_of<UsageError>([&] { marked(twice, turns); }), HasSubstr("message 1 in several places"));
  const auto once = template_of("{{ messages|map(attribute='content')|join }}");
  EXPECT_THAT(message_of<UsageError>([&] { marked(once, turns); }),
              AllOf(HasSubstr("does not write messages one by one"), EndsWith("put them into {% generation %}")));
}

TEST(Chat, TakesPartsAndArgumentsAsItsTemplateDoes) {
  const auto messages = Json::parse(R"([{"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
      {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"b\": 1.0, \"a\": \"é\"}"}}]}])");
  EXPECT_EQ(
      template_of("{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}{% endfor %}")
          .prompt(messages),
      R"(pq{"name": "f", "arguments": {"b": 1.0, "a": "é"}})");
  EXPECT_EQ(
      template_of("{% for m in messages %}{% if m.content is not string %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
                  "{% if m.tool_calls %}{{ 'f' + m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}")
          .prompt(messages),
      R"(<p><q>f{"b": 1.0, "a": "é"})");
}

TEST(Chat, LosesNoToolCalls) {
  const auto with = [](Json content) {
    auto messages = messages_of({{"user", "q"}});
    messages.push_back({{"role", "assistant"}, {"content", std::move(content)}});
    messages.back()["tool_calls"] = Json::parse(R"([{"function": {"name": "f", "arguments": "{\"f\": 1}"}}])");
    return messages;
  };
  const auto none = template_of("{% for m in messages %}{{ m.content }}{% endfor %}");
  for (const auto& content : {Json(""), Json()})
    EXPECT_THAT(message_of<UsageError>([&] { none.prompt(with(content)); }),
                AllOf(HasSubstr("message 2 has tool calls, which the chat template in "), HasSubstr("x.jinja does not write; choose")));
  // Some templates write them only beside a content of null, as DeepSeek's, and others take no null.
  const auto null = template_of(
      "{% for m in messages %}{% if m.content is none %}<{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}>"
      "{% else %}{{ m.content }}{% endif %}{% endfor %}");
  const auto text = template_of("{% for m in messages %}{{ '|' + m.content }}{% if m.tool_calls %}f{% endif %}{% endfor %}");
  for (const auto& content : {Json(""), Json()}) {
    EXPECT_EQ(null.prompt(with(content)), "q<f{\"f\": 1}>");
    EXPECT_EQ(text.prompt(with(content)), "|q|f");
  }
  const auto line = Json::parse(R"({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value":
      "{\"name\": \"f\", \"arguments\": {\"f\": 1}}"}, {"from": "observation", "value": "o"}]})");
  const auto calls = template_of(
      "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}\n{% endfor %}");
  const auto written = [&](const Json& from) {
    std::string text;
    const auto documents = llm::documents_in(from, &calls);
    for (const auto& segment : documents.at(0).segments) text += segment.text;
    return text;
  };
  EXPECT_EQ(written(line), "user q\nassistant {\"name\": \"f\", \"arguments\": {\"f\": 1}}\ntool o\n");
  const auto by_number = template_of(
      "{% for i in range(messages | length) %}{% generation %}{{ messages[i].content }}{% endgeneration %}{% endfor %}");
  EXPECT_THAT(message_of<UsageError>([&] { marked(by_number, messages_of({{"assistant", "a"}, {"assistant", "b"}}), 1); }),
              HasSubstr("does not write messages one by one"));
  const auto inside = template_of(
      "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role ~ m.content ~ (messages[loop.index].content if not loop.last) }}"
      "{% endif %}{% endfor %}");
  EXPECT_THAT(message_of<UsageError>([&] { marked(inside, messages_of({{"user", "u"}, {"assistant", "a"}, {"tool", "t"}})); }),
              HasSubstr("does not write message 3 in a turn of its own"));
  const auto kwargs = template_of("{{ date }} {{ tools | length if tools }}{% for m in messages %}{{ m.content }}{% endfor %}");
  const auto dated = Json::parse(R"({"messages": [{"role": "assistant", "content": "a"}], "tools": "[{}]", "chat_template_kwargs": {"date": "today"}})");
  EXPECT_EQ(llm::documents_in(dated, &kwargs).at(0).segments.front().text, "today 1");
  const auto older = Json::parse(R"({"messages": [{"role": "user", "content": "q"},
      {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{\"f\": 1}"}}]})");
  EXPECT_EQ(written(older), "user q\nassistant {\"name\": \"f\", \"arguments\": {\"f\": 1}}\n");
  const auto thoughts = template_of("{% for m in messages %}{{ m.content if m.content is string }}{{ m.thinking }}{% endfor %}");
  EXPECT_EQ(thoughts.prompt(Json::parse(R"([{"role": "assistant", "content": null, "thinking": "t"}])")), "t");
}

TEST(Chat, KnowsRoles) {
  const auto messages = messages_of({{"developer", "d"}});
  EXPECT_EQ(template_of("{% if messages[0].role == \"developer\" %}{{ messages[0].content }}{% endif %}").prompt(messages), "d");
  EXPECT_THAT(message_of<UsageError>([&] { template_of("{{ messages[0].content }}").prompt(messages); }),
              HasSubstr("x.jinja does not name; choose one of system, user, assistant, tool"));
}

TEST(Chat, ErrorsNameTheLine) {
  const std::pair<const char*, const char*> wrong[] = {{"a\n{% if x %}\nb", "line 2: a tag has no 'endif'"},
                                                       {"\n\n{{ 1 + }}", "line 3: there is '}}' in place of a value"},
                                                       {"{% include 'x' %}", "line 1: the tag 'include' is not supported"},
                                                       {"{{ 'a", "line 1: a text has no end"},
                                                       {"{% endif %}", "line 1: the tag 'endif' is not supported"},
                                                       {"{# a", "line 1: a comment has no end"}};
  for (const auto& [text, why] : wrong)
    EXPECT_THAT(message_of<ConfigError>([&] { template_of(text); }), HasSubstr(std::string("x.jinja, ") + why)) << text;
  const std::pair<const char*, const char*> failing[] = {{"\n{{ nothing.at }}", "line 2: 'nothing' is undefined"},
                                                         {"{{ raise_exception('roles must alternate') }}", "line 1: roles must alternate"},
                                                         {"{{ 'a' + 1 }}", "string + number can't be computed"},
                                                         {"{{ 'a' | wordwrap }}", "the filter or method 'wordwrap' is not supported"},
                                                         {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "f() calls itself too often"},
                                                         {"{{ messages.append(1) }}", "'append' is not a method of array"},
                                                         {"{{ range(1000000) }}", "range() is too long"}};
  for (const auto& [text, why] : failing)
    EXPECT_THAT(message_of<UsageError>([&] { template_of(text).prompt(messages_of({{"user", "q"}})); }), HasSubstr(why)) << text;
  EXPECT_THAT(message_of<ConfigError>([] { template_of("{{ " + std::string(100'000, '(')); }), HasSubstr("too many tags or brackets"));
}

TEST(Chat, IsFoundBesideTheModel) {
  const Folder folder;
  EXPECT_THAT(message_of<ConfigError>([&] { ChatTemplate::of(folder.path()); }), HasSubstr("has no chat template; choose chatml"));
  write_file(
      folder / "tokenizer_config.json",
      R"({"bos_token": "<s>", "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "{{ bos_token }}d"}]})");
  EXPECT_EQ(ChatTemplate::of(folder.path()).prompt(messages_of({{"user", "q"}})), "<s>d");
  write_file(folder / "chat_template.jinja", "{{ messages[0].content }}\n\n");
  EXPECT_EQ(ChatTemplate::of(folder.path()).prompt(messages_of({{"user", "q"}})), "q\n");
  write_file(folder / "chat_template.jinja", "{{ raise_exception('no') }}");
  EXPECT_THAT(message_of<UsageError>([&] { ChatTemplate::of(folder.path()).prompt(messages_of({{"user", "q"}})); }),
              HasSubstr("chat_template.jinja, line 1: no"));
}

TEST(Chat, TextsAreThoseOfJinja) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/chat_texts.py", folder.path()});
  ASSERT_EQ(written.status, 0) << written.output;
  std::ifstream lines(folder / "texts.jsonl");
  std::map<std::string, llm::jinja::Template> templates;
  int texts = 0;
  for (std::string line; std::getline(lines, line); texts++) {
    const auto expected = Json::parse(line);
    const auto text = expected["template"].get<std::string>();
    const auto& chat = templates.try_emplace(text, text).first->second;
    if (expected["text"].is_null()) {
      EXPECT_THROW(chat.render(expected["variables"]), UsageError) << line;
    } else {
      ASSERT_EQ(chat.render(expected["variables"]).text, expected["text"].get<std::string>()) << expected["variables"];
    }
  }
  EXPECT_EQ(texts, 600);
}

}  // namespace
}  // namespace tessera::testing::chat_test
