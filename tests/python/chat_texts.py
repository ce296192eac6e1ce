"""Renders templates of all constructs that chat templates use, as transformers does: texts.jsonl has a line for each text.

chat_texts.py FOLDER
"""
import json
import pathlib
import random
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller):
        return caller()


def refuse(message):
    raise jinja2.TemplateError(message)


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
environment.globals["raise_exception"] = refuse

TEMPLATES = [
    # Turns with their roles, blanks around tags, a first system message apart, a role that has another name.
    """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and false -%}{{ raise_exception("turns") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<turn>' + role + '\n' + (system if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- endif -%}
    {{ '</turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}
""",
    # Tools, a namespace, a search from the end, text methods, and thoughts that only the last turn keeps.
    """{%- if tools %}
{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
{{- "\\n" }}{{ tool | tojson }}
{{- tool.function.parameters.properties | tojson(indent=2, sort_keys=true) }}
{{- tool.function.parameters['properties'].items() | list | length }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.tool and message.role == "user" and message.content is string and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role in ["user", "system"] %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' }}{% generation %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}{{ '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<call>{"name": "' ~ call.name ~ '", "arguments": ' }}{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<r>\\n' + content + '\\n</r>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
""",
    # Macros, set blocks, comments, loops with conditions, break and continue, defaults, joins, dicts, chained comparisons.
    """{#- A comment. -#}
{% macro kind(type, deep=0) -%}
  {% if type is mapping %}{{ type.get('type', 'any') }}{% elif type is none %}none{% else %}
    {{- type | upper }}{% if deep < 2 %}({{ kind(type, deep + 1) }}){% endif %}
  {%- endif %}
{%- endmacro %}
{% set names = {'user': 'U', "assistant": 'A'} %}
{% set head %}
  Hello {{ names.user }} {{ names['assistant'] }} {{ names.nobody }} {{ nobody | default('D') }} {{ '' | default('E', true) }}
{% endset %}
{{ head | trim }} {{ head | length }}
{% for message in messages if message.role != 'system' %}
  {% if loop.index > 4 %}{% break %}{% endif %}
  {% if message.content is not defined or not message.content %}{% continue %}{% endif %}
  {{ loop.index }}/{{ loop.length }} {{ loop.revindex0 }} {{ names.get(message.role, 'other') }} {{ kind(message.role) }} {{ message.content }}
  {{ message.content | string | replace('a', 'b') | indent(2) }} {{ loop.previtem.role if loop.previtem is defined else '-' }}
{% else %}
  none
{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | unique | sort | join('|') }}
{{ 1 < 2 and 2 <= 2 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 * 3 + 1 }} {{ 'ab' * 2 }} {{ [1, 2] + [3] }} {{ 'b' not in 'abc' }} {{ true and none }}
{{ messages[-1].role[0] }} {{ messages[-1].role[1:3] }} {{ messages[0].role[::-1] }} {{ 'x' if false }} {{ "q'" ~ 1.0 ~ none ~ [] ~ {'a': ["b'", true]} }}
{%- for key, value in names | dictsort %} {{ key }}={{ value }}{% endfor %} {%+ if true +%} spaced {% endif %}
{% for i in range(3) %}{{ i }}{% if not loop.last %},{% endif %}{% endfor %} {{ '%s' | length }} {{ ' a b ' .split() }} {{ (1, 'x') | first }}
{{ 'aB, cD' | capitalize }} {{ '' | capitalize }} {{ 'x-yZ (o\\'n <r' | title }} {{ messages[0].role.capitalize() }}
{{ raise_exception('last is not user: ' ~ messages[-1].role) if messages[-1].role == 'tool' }}
""",
]

WORDS = ["hi", " lead", "trail \n", "\n\nx", "<think>", "a\n</think>\n\nb", "日本語", "e\u0301", "'q'", '"d"', "\\", "{{x}}", "\t", "\u3000", "😀", "&<>", "<r>", ""]


def text(draw):
    return draw.choice(["", " ", "\n"]) + " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 4))) + draw.choice(["", "\n"])


def chat(draw):
    value = lambda: draw.choice([None, True, draw.randint(-9, 999), 0.5, 1e20, 1e-7, text(draw), [text(draw), 1], {"b": text(draw), "a": {}}])
    tool = lambda: {"type": "function", "function": {"name": "f", "description": text(draw), "parameters": {"type": "object", "properties": {
        name: {"type": "string", "description": text(draw)} for name in draw.sample(["city", "items", "count"], draw.randint(0, 3))}}}}
    messages = [{"role": "system", "content": text(draw)}] if draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 3)):
        content = text(draw) if draw.random() < 0.8 else [{"type": "text", "text": text(draw)}, {"type": "text", "text": text(draw)}]
        messages.append({"role": "user", "content": content})
        if draw.random() < 0.3:
            arguments = {"a": value(), "é": value()}
            arguments = json.dumps(arguments) if draw.random() < 0.3 else arguments
            messages.append({"role": "assistant", "content": draw.choice(["", None, text(draw)]),
                             "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]})
            messages.append({"role": "tool", "content": text(draw)})
        if draw.random() < 0.9:
            messages.append({"role": "assistant", "content": text(draw)})
    return {"messages": messages, "tools": [tool() for _ in range(draw.randint(1, 2))] if draw.random() < 0.4 else None, "documents": None,
            "add_generation_prompt": draw.random() < 0.5, "bos_token": "<s>", "eos_token": "</s>"}


def main():
    draw = random.Random(69)
    folder = pathlib.Path(sys.argv[1])
    with (folder / "texts.jsonl").open("w") as out:
        for template in TEMPLATES:
            compiled = environment.from_string(template)
            for _ in range(200):
                variables = chat(draw)
                try:
                    rendered = compiled.render(**variables)
                except (jinja2.TemplateError, TypeError):
                    rendered = None
                print(json.dumps({"template": template, "variables": variables, "text": rendered}), file=out)


main()
