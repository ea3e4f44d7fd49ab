"""How much of a body is decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from stoker.common.errors import InvalidRequest
from stoker.router.prompts.decode import SMALL, decode
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, RESPONSES, read

MANY = [0] * 70_000
NESTED: list[Any] = [[]] * 60_000


def encoded(**body: Any) -> bytes:
    return json.dumps({"model": "m", **body}, separators=(",", ":")).encode()


def test_a_small_body_is_decoded_whole() -> None:
    assert decode(encoded(anything={"a": [1]})) == {"model": "m", "anything": {"a": [1]}}


def test_a_long_text_is_no_many_values_whatever_it_says() -> None:
    said = 'f("x", [1, {2: "\\"}]),\n' * 20_000
    body = {"messages": [{"role": "user", "content": said}], "unknown": {"a": [1]}}
    raw = encoded(**body)
    assert len(raw) > SMALL
    assert raw.count(b",") > 50_000
    assert decode(raw) == {"model": "m", **body}


@pytest.mark.parametrize("said", ['"', "\\", '\\"', "[\\", ',"', "\\\\"])
def test_text_that_looks_like_structure_hides_none(said: str) -> None:
    body = decode(encoded(messages=[said, *NESTED], stop=said))
    assert isinstance(body["messages"], Raw)
    assert "stop" not in body
    assert decode(encoded(messages=[said * 60_000]))["messages"] == [said * 60_000]


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES])
def test_what_holds_too_much_is_routed_by_its_bytes_and_its_settings_are_read(api: str) -> None:
    field = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[api]
    limit = "max_output_tokens" if api == RESPONSES else "max_tokens"
    raw = encoded(**{field: NESTED, limit: 7, "stream": True, "n": 3, "unknown": NESTED, "cache_salt": "s"})
    asked = read(api, decode(raw), raw)
    assert (asked.model, asked.stream) == ("m", True)
    prompt = asked.prompt
    assert (prompt.unreadable, prompt.max_output_tokens, prompt.choices, prompt.cache_salt) == (
        "many_values",
        7,
        3,
        "s",
    )
    assert prompt.raw is raw


def test_many_token_ids_are_still_read() -> None:
    raw = encoded(prompt=MANY)
    assert read(COMPLETIONS, decode(raw), raw).prompt.token_ids == (MANY,)
    assert isinstance(decode(encoded(prompt=[*MANY, -1]))["prompt"], Raw)


def test_many_values_beside_the_prompt_do_not_hide_it() -> None:
    raw = encoded(logit_bias={str(n): 1 for n in range(60_000)}, prompt="x" * SMALL)
    assert read(COMPLETIONS, decode(raw), raw).prompt.texts == ("x" * SMALL,)


def test_what_no_caller_may_ask_is_found_among_however_much() -> None:
    raw = encoded(prompt="x", vllm_xargs={"padding": MANY, "kv_cache_report_mode": "full"})
    with pytest.raises(InvalidRequest, match="kv_cache_report_mode"):
        read(COMPLETIONS, decode(raw), raw)
    raw = encoded(prompt="x", vllm_xargs={"padding": MANY})
    assert read(COMPLETIONS, decode(raw), raw).prompt.texts == ("x",)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model":', "no valid JSON"),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "no valid JSON"),
        (b'{"model":"m","x":[' + b"0," * 60_000 + b"]}", "no valid JSON"),
        (b"[" + b"0," * 60_000 + b"0]", "must be a JSON object"),
        (b'{"model":"m","x":"\xff"}', "no valid JSON"),
        (b'{"model":"m","x":[' + b"0," * 2_000_001 + b"0]}", "holds millions of values"),
        (b"{" + b",".join(b'"%x":0' % key for key in range(520_000)) + b"}", "holds millions of values"),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        decode(raw)
    assert refused.value.fields[0].field == "body"
