"""A body's JSON, decoded as far as routing needs, at a cost with a bound.

The decoder holds the interpreter lock, so in a thread too everything else waits for it: 16 MiB of empty lists
take it seconds. What is large is weighed first, and where it holds too much, only what routing cannot do without
is decoded. The rest stays `msgspec.Raw`: the engine gets the body as it came in any case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from stoker.common.errors import InvalidRequest

SMALL = 128 * 1024
"""Bodies up to this many bytes are decoded whole at once, in a few milliseconds at worst."""

# Each bound is some 10 to 20 ms of the decoder's time.
_DECODED_VALUES = 50_000
_DECODED_ESCAPES = 2_000_000
_SKIPPED_WEIGHT = 2_000_000
_TOKENS = 1_000_000
_FIELD_BYTES = 4096

# What opens or separates values: there are no more values in a body than these, and one.
_MARKS = (b",", b"[", b"{")
_TO_STRING_END = re.compile(rb'[^"]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

# All that `prompt` reads of a body.
_READ = [
    *("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("prompt", "messages", "input", "instructions", "tools", "documents", "suffix", "prompt_embeds"),
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "truncation"),
    *(
        "reasoning",
        "reasoning_effort",
        "previous_response_id",
        "prompt_cache_key",
        "priority",
        "cache_salt",
        "vllm_xargs",
    ),
]
_Envelope = msgspec.defstruct("_Envelope", [(name, Raw | UnsetType, UNSET) for name in _READ])
_Forbidden = msgspec.defstruct("_Forbidden", [("kv_cache_report_mode", Raw | UnsetType, UNSET)])
_Tokens = list[Annotated[int, Meta(ge=0)]]


class Partly(dict[str, Any]):
    """The fields of a body of which there are more."""


def decode(raw: bytes) -> Mapping[str, Any]:
    """A body's fields. Where it is large and holds many values, only those that routing reads, and of these the
    costly ones as `msgspec.Raw`. Raises InvalidRequest where it is no JSON object.

    Takes tens of milliseconds where the body is not `SMALL`, mostly in short steps: call it in a thread then.
    """
    try:
        if len(raw) <= SMALL or (_few_escapes(raw) and _few_values(raw)):
            body = msgspec.json.decode(raw)
            if not isinstance(body, dict):
                raise InvalidRequest.field("body", "must be a JSON object")
            return body
        # To skip a key takes as long as to skip a few values.
        if sum(map(raw.count, _MARKS)) + 3 * raw.count(b":") > _SKIPPED_WEIGHT:
            raise InvalidRequest.field("body", "holds millions of values, more than this router reads; send fewer")
        return _envelope(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest.field("body", "must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest.field("body", f"is no valid JSON: {error}") from error


def _few_escapes(raw: bytes) -> bool:
    return raw.count(b"\\") <= _DECODED_ESCAPES


def _few_values(raw: bytes) -> bool:
    """Whether there are few values, text aside: prompts are full of commas."""
    marks = sum(map(raw.count, _MARKS))
    if marks <= _DECODED_VALUES:
        return True
    marks = at = strings = 0
    while (found := _TO_STRING_END.match(raw, at)) is not None:
        gap_ends = raw.index(b'"', at)
        marks += sum(raw.count(mark, at, gap_ends) for mark in _MARKS)
        strings += 1
        if marks > _DECODED_VALUES or strings > 2 * _DECODED_VALUES:
            return False
        at = found.end()
    return marks + sum(raw.count(mark, at) for mark in _MARKS) <= _DECODED_VALUES


def _envelope(raw: bytes) -> Partly:
    envelope = msgspec.json.decode(raw, type=_Envelope)
    fields = Partly()
    for name in _READ:
        value = getattr(envelope, name)
        if value is not UNSET:
            fields[name] = _field(name, value)
    return fields


def _field(name: str, value: Raw) -> Any:
    text = bytes(value)
    if len(text) <= _FIELD_BYTES or (text.startswith(b'"') and _few_escapes(text)):
        return msgspec.json.decode(text)
    try:  # each ends at the first value that does not fit
        if name == "vllm_xargs":
            # What is forbidden in it must be seen, however much there is beside it.
            forbidden = msgspec.json.decode(text, type=_Forbidden)
            return {field: value for field in _Forbidden.__struct_fields__ if getattr(forbidden, field) is not UNSET}
        if name in ("prompt", "input") and text.count(b",") <= _TOKENS:
            return msgspec.json.decode(text, type=_Tokens)
    except msgspec.ValidationError:
        pass
    return value
