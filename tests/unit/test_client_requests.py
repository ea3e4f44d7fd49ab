"""Requests from plain values, and errors by kind."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.client.errors import Interrupted, typed
from stoker.client.prompts import pick_of, request_of
from stoker.client.results import Gathering
from stoker.client.settings import ClientSettings
from stoker.common.errors import Code, Exhausted, InvalidRequest, StokerError, Unavailable
from stoker.common.tickets import TicketRefused


def test_a_prompt_is_a_text_token_ids_or_messages() -> None:
    assert request_of("m", "hello", max_tokens=3, stop="x", temperature=None).sampling.stop == ["x"]
    assert list(request_of("m", [1, 2, 3]).token_ids.ids) == [1, 2, 3]
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    chat = request_of("m", messages).chat.messages
    assert [part.WhichOneof("part") for part in chat[0].content] == ["text", "image_url"]
    assert (chat[1].tool_calls[0].name, chat[2].tool_call_id) == ("f", "1")


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([], {}),
        ("x", {"warmth": 1}),
        ("x", {"max_tokens": "many"}),
        ([-1], {}),
        ([2**32], {}),
        ([1.5], {}),
        ([{"content": "x"}], {}),
        ([{"role": "user", "content": [{"type": "smell"}]}], {}),
        ([{"role": "user"}, "x"], {}),
    ],
)
def test_what_cannot_be_sent_is_refused_here(prompt: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        request_of("m", prompt, **fields)


def test_token_ids_are_picked_for_packed_unless_the_engine_cuts_them() -> None:
    request = request_of("m", [1, 2, 3], max_tokens=4, n=2, session_id="s", priority=3, cache_salt="c")
    asked = pick_of(request, 1).tokenized
    assert asked.token_ids == array("I", [1, 2, 3]).tobytes()
    assert (asked.max_tokens, asked.n, asked.session_id, asked.priority, asked.cache_salt) == (4, 2, "s", 3, "c")
    assert not pick_of(request_of("m", [1]), 1).tokenized.HasField("max_tokens")
    assert pick_of(request_of("m", [1, 2, 3], truncate_prompt_tokens=2), 1).WhichOneof("subject") == "request"
    assert pick_of(request_of("m", "text"), 1).WhichOneof("subject") == "request"


def test_errors_get_the_class_of_their_code() -> None:
    held = typed(StokerError("x", code=Code.RESOURCE_EXHAUSTED, reason="HELD", retry_after_s=0.5))
    assert isinstance(held, Exhausted)
    assert (held.reason, held.retry_after_s) == ("HELD", 0.5)
    assert isinstance(typed(StokerError("x", code=Code.PERMISSION_DENIED, reason="TICKET_USED")), TicketRefused)
    gone = Unavailable("x")
    assert typed(gone) is gone
    odd = StokerError("x", code=Code.INTERNAL)
    assert typed(odd) is odd


def test_an_interrupted_stream_says_what_came() -> None:
    gathered = Gathering()
    for index, text in ((0, "ab"), (1, "x"), (0, "c")):
        gathered.add(inference_pb2.Delta(index=index, text=text, token_ids=[index]))
    gathered.add(inference_pb2.Delta(index=1, finish_reason="stop"))
    assert [(choice.text, choice.finish_reason) for choice in gathered.choices()] == [("abc", ""), ("x", "stop")]
    broken = Interrupted(StokerError("gone", reason="ENGINE_DIED"), gathered.text, gathered.token_ids)
    assert broken.text == {0: "abc", 1: "x"}
    assert broken.token_ids == {0: [0, 0], 1: [1]}
    assert broken.reason == "ENGINE_DIED"
    assert "4 characters" in broken.message


@pytest.mark.parametrize("fields", [{"timeout_s": 0}, {"connect_s": -1}, {"timeout_s": float("nan")}])
def test_settings_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ClientSettings(**fields)
