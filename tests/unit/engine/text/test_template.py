"""Chat templates: what models' own templates produce, what they may refuse, and what they may not do."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from tonle.engine.text import load_text
from tonle.engine.text.sandbox import MAX_CHARS
from tonle.engine.text.template import ROLES, ChatTemplate, plain_messages
from tonle.errors import InvalidRequest
from tonle.models.source import ModelSource
from tonle.protocol.openai import Role

CHAT = [{"role": "user", "content": "សួស្តី <b>&"}]

CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' ~ message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The features templates of several model families rely on, in one.
FEATURES = """\
{{ bos_token }}
{%- set state = namespace(turns=0) -%}
{%- macro line(text) -%}[{{ text | trim }}]{%- endmacro -%}
{%- if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' %}{% continue %}{% endif -%}
    {%- if state.turns >= 2 %}{% break %}{% endif -%}
    {%- set state.turns = state.turns + 1 -%}
    {{- loop.index0 }}/{{ loop.length }}{% if loop.last %}!{% endif -%}
    {%- generation %}{{ line(message['content']) }}{% endgeneration -%}
    {%- for call in message.tool_calls or [] -%}{{ call.function.arguments | tojson }}{%- endfor -%}
{%- endfor -%}
{%- if enable_thinking is defined and not enable_thinking %}<quiet>{% endif -%}
{{ strftime_now('%Y') }}"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(CHAT if messages is None else messages, **options)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nសួស្តី <b>&<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nសួស្តី <b>&<|im_end|>\n"


def test_roles_are_those_of_the_api_and_developer_is_system() -> None:
    assert get_args(Role) == ROLES
    messages = [{"role": "developer", "content": "x"}]
    assert render(CHATML, messages, add_generation_prompt=False) == "<|im_start|>system\nx<|im_end|>\n"
    assert messages[0]["role"] == "developer"
    messages = [{"role": "function", "content": "x"}]
    assert render(CHATML, messages, add_generation_prompt=False) == "<|im_start|>tool\nx<|im_end|>\n"


def test_the_last_message_can_be_continued() -> None:
    for content in ("Once upon ", "", "im_end", " a\n"):
        messages = [{"role": "user", "content": "im_end"}, {"role": "assistant", "content": content}]
        template = ChatTemplate(CHATML, special_tokens={})
        prompt = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.endswith(f"<|im_start|>assistant\n{content}"), "to the letter, spaces and all"
        assert messages[1]["content"] == content
    with pytest.raises(InvalidRequest, match="does not write the content of the last message"):
        ChatTemplate("{{ messages[0].content }}", special_tokens={}).render(messages, continue_final_message=True)


def test_features_of_other_families() -> None:
    messages = [
        {"role": "user", "content": " hi "},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "<é>"}'}}]},
        {"role": "user", "content": "never"},
    ]
    text = render(FEATURES, messages, tools=[{"name": "ទ"}], extra={"enable_thinking": False})
    head, year = text[:-4], text[-4:]
    assert head == '<s>[{"name": "ទ"}]{\n  "name": "ទ"\n}0/4[hi]2/4[]{"a": "<é>"}<quiet>'
    assert re.fullmatch(r"\d{4}", year)


# As models that see images have it: strings have no parts, and would be left out without a word.
PARTS = """\
{%- for message in messages -%}
    [{{ message['role'] }}
    {%- for part in message['content'] | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %}]
{%- endfor -%}"""


def test_templates_that_read_parts_alone() -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": [{"type": "text", "text": "two"}]}]
    assert render(PARTS, messages) == "[user one][assistant two]"
    prompt = ChatTemplate(PARTS, special_tokens={}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt == "[user one][assistant two"
    either = "{% set c = messages[0].content %}{{ c if c is string else 'parts' }}"
    assert render(either, messages[:1]) == "one", "strings are what most templates are tested with"


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, special_tokens={})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=[{"name": "f"}]) == "with tools"
    assert template.source == "plain"


@pytest.mark.model
def test_the_default_models_template(default_model: ModelSource) -> None:
    text = load_text(default_model)
    assert text.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.render_chat([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>system\nYou are a helpful AI")
    tokens = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokens[0] == text.bos_id
    assert tokens.count(1) == 3  # <|im_start|>: system, user, assistant; no BOS beside the template's own


def test_contents_become_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "1", "function": {"name": "f", "arguments": "not json"}}
    messages = plain_messages(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant"},
        ]
    )
    assert [message["content"] for message in messages] == ["one\ntwo", "", None, ""]
    assert messages[2]["tool_calls"] == [call]


@pytest.mark.parametrize(
    "arguments", ["[" * 2000, "[" * 2000 + "]" * 2000, '{"a": "\\ud800"}', '{"a": NaN}', "1e999", "9" * 5000]
)
def test_arguments_that_are_no_json_stay_as_they_are(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    rendered = render(FEATURES, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert rendered.encode()  # no half of a surrogate pair came out of it
    assert json.dumps(arguments, ensure_ascii=False) in rendered


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must not be empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        (["x"], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [5]}], "type 'int'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "not a string"),
        (
            [{"role": "wizard", "content": "x"}],
            r"\[0\]\.role must be one of assistant, developer, function, system, tool, user, not 'wizard'",
        ),
    ],
)
def test_messages_refused(messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        render(CHATML, messages)


def test_arguments_cannot_replace_the_chat() -> None:
    with pytest.raises(InvalidRequest, match="'messages' is set by the server"):
        render(CHATML, extra={"messages": []})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "broken: line 1"),
        ("{{ messages[0].content + 5 }}", "failed on these messages"),
        ("{{ missing.thing }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ missing | tojson }}", "failed on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    ],
)
def test_failures_say_why(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__name__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * [0] }}",
        "{{ 9 ** 999999999 }}",
        "{{ 2 ** 64 ** 64 ** 64 }}",
        "{% set s = namespace(n=3) %}{% for i in range(60) %}{% set s.n = s.n * s.n %}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for i in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_work_is_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_unsafe_attributes_are_empty() -> None:
    assert render("{{ messages.__class__ }}{{ raise_exception.__globals__ }}{{ messages[0]._x }}") == ""


def test_bounds_leave_room_for_long_chats() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    assert len(render(CHATML, messages)) > 5_000_000
    assert MAX_CHARS > 10_000_000


def test_text_that_looks_like_a_format_is_only_text() -> None:
    content = '{"id": 12345678, "note": "100% * {0}"}'
    assert render("{{ messages[0].content.strip() }}", [{"role": "user", "content": content}]) == content


def test_a_text_that_grows_in_a_loop_is_bounded_by_what_is_copied() -> None:
    """Each turn is cheap in steps, but copies all that came before it: hours of work for a long chat."""
    turn = "{% for m in messages %}{% set ns.text = ns.text ~ m.content %}{% endfor %}"
    source = "{% set ns = namespace(text='') %}" + turn + "{{ ns.text }}"
    few, many = [{"role": "user", "content": "x" * 100}] * 1000, [{"role": "user", "content": "x" * 100}] * 60_000
    assert len(render(source, few)) == 100_000
    with pytest.raises(InvalidRequest, match="takes more than"):
        render(source, many)
