"""What is noted of a stream as it passes, and what its client sees of that."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from stoker.router import core
from stoker.router.flights.continuation import Answer
from stoker.router.http.continuation import Noted, events_of


class Asked:
    """An answer that was asked for with these fields."""

    def __init__(self, **fields: Any) -> None:
        self.said = core.Said()
        self.fields = fields
        self.shows_tokens = fields.get("return_token_ids") is True


def noted(**fields: Any) -> Noted:
    return Noted(cast("Answer", Asked(**fields)))


def event(text: str, tokens: list[int] | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": tokens, **more}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def test_token_ids_are_noted_and_do_not_show() -> None:
    seen = noted()
    told = event("a", [1, 2], prompt_token_ids=[7, 8, 9]) + event("b", [3])
    assert seen.passed(told) == event("a", None, prompt_token_ids=None) + event("b", None)
    seen.passed(b"data: [DONE]\n\n")
    seen.read()
    assert (list(seen.answer.said.tokens), seen.answer.said.text) == ([1, 2, 3], "ab")
    assert seen.head == {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m"}


def test_text_that_looks_like_token_ids_passes_as_it_is() -> None:
    for text in ('"token_ids":[1,2]', 'token_ids":[3]', '\\"token_ids\\":[4]', 'x\n\ndata: {"a":[5]}'):
        told = event(text, None)
        assert noted().passed(told) == told


def test_events_for_token_ids_alone_are_left_out() -> None:
    def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": [5]}
        return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"

    seen = noted()
    passed = seen.passed(chat({"content": "a"}) + chat({}) + chat({"content": "b"}) + chat({}, "stop"))
    assert passed == (chat({"content": "a"}) + chat({"content": "b"}) + chat({}, "stop")).replace(b"[5]", b"null")
    assert seen.passed(chat({})) == b""
    seen.read()
    assert list(seen.answer.said.tokens) == [5] * 5, "what they told is noted"


def test_who_asked_for_token_ids_gets_them() -> None:
    seen = noted(return_token_ids=True)
    told = event("a", [1])
    assert seen.passed(told) == told
    assert seen.asking(b'{"return_token_ids":true}') == b'{"return_token_ids":true}'


def test_asking_leaves_the_request_as_it_is() -> None:
    body = json.loads(noted().asking(b' \n{ "model":"m", "odd": {"a":1}}'))
    assert body == {"return_token_ids": True, "model": "m", "odd": {"a": 1}}


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (b'data: {"error":{"message":"no"}}\n\n', "refused"),
        (b"data: {nonsense}\n\n", "unlike"),
        (b'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}\n\n', "reasoning"),
        (b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n', "tool_calls"),
        (b'data: {"choices":[{"index":0,"text":"no ids"}]}\n\n', "no_tokens"),
    ],
)
def test_what_cannot_be_continued_is_seen(odd: bytes, why: str) -> None:
    seen = noted()
    seen.passed(odd)
    seen.read()
    assert seen.answer.said.broken == why


def test_events_are_read_alike_one_by_one_and_all_at_once() -> None:
    several = event("a", [1]) + event("\\n\\ndata: b", [2]) + b"data: [DONE]\n\n"
    assert [e.choices[0].token_ids for e in events_of(several) if e is not None] == [[1], [2]]
    with_comment = b": hello\n\n" + several
    assert events_of(with_comment) == events_of(several)
    assert events_of(b"data: [DONE]\n\n") == []


def test_long_streams_are_read_as_they_grow() -> None:
    seen = noted()
    for number in range(2_000):
        seen.passed(event("word ", [number]))
    assert len(seen.answer.said.tokens) > 1_000
    seen.read()
    assert list(seen.answer.said.tokens) == list(range(2_000))
