"""Chat templates render as engines render them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.local.chat_template import CHAT_TEMPLATE
from stoker.router.prompts.render import MEDIA_MARK, ChatTemplate, Conversation, NotRendered

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(Conversation(messages, **more))


def test_templates_get_what_transformers_gives_them() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "[{{ m.role }}]{% generation %}{{ m['content'] }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    assert render(source, [USER, {"role": "skip", "content": "no"}]) == "<s>[user]hi>"
    assert render(source, [USER], add_generation_prompt=False) == "<s>[user]hi"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "user", "content": [{"type": []}]},
        {"role": "user", "content": [5]},
        {"role": "user", "content": 5},
        {"role": ["user"]},
    ],
)
def test_what_has_the_wrong_type_is_not_rendered(odd: dict[str, Any]) -> None:
    with pytest.raises(NotRendered):
        render("{{ messages }}", [odd])


def test_arguments_too_deep_to_read_are_none() -> None:
    call = {"function": {"name": "f", "arguments": DEEP}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", [message]) == "{}"


def test_tojson_escapes_no_html_and_keeps_order() -> None:
    source = "{{ tools | tojson }}|{{ messages[0].content | tojson(indent=1) }}"
    tools = [{"type": "function", "function": {"parameters": {"z": "<é>"}, "name": "f"}, "odd": 1}]
    got, content = render(source, [USER], tools=tools).split("|")
    # As the engine's own request model writes a tool out: its fields, in its order, description present.
    assert got == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": "<é>"}}}]'
    )
    assert json.loads(content) == "hi"


def test_raise_exception_refuses() -> None:
    with pytest.raises(NotRendered, match="no such role"):
        render("{{ raise_exception('no such role') }}", [USER])


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os.getcwd() }}"],
)
def test_templates_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(NotRendered):
        render(attack, [USER])


def test_bad_syntax_is_said() -> None:
    with pytest.raises(NotRendered, match="does not compile"):
        ChatTemplate("{% if %}", SPECIAL)


PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}


def test_content_parts_are_joined_for_templates_that_print_content() -> None:
    assert render("{{ messages[0]['content'] }}", [PARTS]) == "a\nb"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for c in m['content'] %}<{{ c.text }}>{% endfor %}{% endfor %}",
        "{% set all = messages[1:] if false else messages %}{% set ms = messages %}"
        "{% for m in ms %}{% for c in m.content %}<{{ c['text'] }}>{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}"
        "{% for c in content %}<{{ c.text }}>{% endfor %}{% endfor %}",
        "{% macro show(x) %}{% for c in x %}<{{ c.text }}>{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    ],
)
def test_content_stays_in_parts_for_templates_that_walk_through_it(source: str) -> None:
    assert render(source, [PARTS]) == "<a><b>"
    assert render(source, [USER]) == "<hi>"


def test_tool_call_arguments_become_objects() -> None:
    def call(arguments: object) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, [call('{"b": 1, "a": 2}')]) == '{"b": 1, "a": 2}'
    assert render(source, [call({"a": 1})]) == '{"a": 1}'
    for odd in ("", None, "not json", "[1]", 5):
        assert render(source, [call(odd)]) == "{}", odd


def test_messages_of_the_caller_are_left_as_they_are() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    before = json.dumps(message)
    render(CHAT_TEMPLATE, [USER, message])
    assert json.dumps(message) == before


def test_developer_messages_become_one_system_message_in_front() -> None:
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    messages = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
    assert render(source, messages) == "[system:a\n\nb][user:hi]"
    knows = source + "{# 'developer' #}"
    assert render(knows, messages) == "[system:a][user:hi][developer:b]"


def test_the_last_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The fire is"}]
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    got = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert got == "[user]hi<end>[assistant]The fire is"


@pytest.mark.parametrize(("filter_", "expected"), [("", "[ About 451. "), ("| trim", "[About 451.")])
def test_a_template_that_trims_has_the_continued_message_trimmed(filter_: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": " About 451. "}]
    source = "[{{ messages[0].content " + filter_ + " }}]"
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_only_variables_the_template_knows_are_passed() -> None:
    source = "{{ enable_thinking }}{{ tools is none }}"
    assert render(source, [USER], variables={"enable_thinking": False, "messages": [], "x": 1}) == "FalseTrue"


def test_media_leave_a_mark_where_they_stand() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == f"see\n{MEDIA_MARK}"


def test_parts_of_unknown_kinds_are_not_rendered() -> None:
    with pytest.raises(NotRendered, match="hologram"):
        render(CHAT_TEMPLATE, [{"role": "user", "content": [{"type": "hologram"}]}])
