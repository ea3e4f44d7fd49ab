"""What an engine is sent: a body as it came, or with its prompt's tokens, so that nobody tokenizes twice (ADR 44).

Of the body nothing else changes, not by a byte. A completion's tokens stand in place of its text; a chat's stand
beside its messages, where vLLM looks for the tokens of a prefill that was done elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from stoker.router import metrics
from stoker.router.fleet.pools import Target
from stoker.router.prompts.decode import Partly
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import CHAT, COMPLETIONS

SendTokens = Literal["never", "completions", "always"]

# An answer shows the text of the prompt, or the engine shall do more to it than tokenize, or has tokens already.
_NEEDS_TEXT = frozenset({
    *("echo", "suffix", "prompt_embeds", "return_token_offsets", "return_prompt_text", "mm_processor_kwargs"),
    *("truncate_prompt_tokens", "truncation_side", "kv_transfer_params", "chat_template"),
})  # fmt: skip
_STEP = 8192
"""So many tokens are written as JSON (0.2 ms) before others get their turn."""
_TOLD_BY = 64
"""A prompt is found in its body by so many bytes of it: to look for all of a long one takes longer than to read."""


class _Completion(msgspec.Struct):
    prompt: msgspec.Raw


_prompt_of = msgspec.json.Decoder(_Completion).decode
_encode = msgspec.json.Encoder().encode


class Sent:
    """One request's body, for each replica that it is sent to."""

    def __init__(self, raw: bytes, api: str, fields: Mapping[str, Any], plan: Plan, send_tokens: SendTokens) -> None:
        """`fields` are those of `raw`, which are looked at for what needs the text."""
        self._text = raw
        self._tokens: bytes | None = None
        self._plan = plan
        self._chat = api == CHAT
        self._may = _may(api, fields, plan, send_tokens)

    async def to(self, target: Target) -> bytes:
        """The body for a replica. Text goes to those not proved to read it as this router does."""
        takes = target.reads_by(self._plan.tokenizer) and (target.takes_chat_tokens or not self._chat)
        if not self._may or not takes:
            metrics.of(metrics.SENT, "text").inc()
            return self._text
        if self._tokens is None:
            self._tokens = await self._with_tokens()
        metrics.of(metrics.SENT, "tokens").inc()
        return self._tokens

    async def _with_tokens(self) -> bytes:
        ids = await _as_json(self._plan.ids)
        if self._chat:
            rest = self._text[self._text.index(b"{") + 1 :]
            return b'{"kv_transfer_params":{"prompt_token_ids":' + ids + b"}," + rest
        return _in_place_of_prompt(self._text, ids)


def _may(api: str, fields: Mapping[str, Any], plan: Plan, send_tokens: SendTokens) -> bool:
    if not plan.ids or send_tokens == "never" or isinstance(fields, Partly):
        return False
    if api != COMPLETIONS and not (api == CHAT and send_tokens == "always"):
        return False
    if fields.get("tool_choice") == "none" and fields.get("tools"):
        return False  # whether the model is shown tools that it may not call is a setting of the engine
    # Of a prompt that leaves no room for output the engine says so itself, in its own words.
    fits = len(plan.ids) // 4 < plan.pool.max_model_len
    return fits and all(fields[name] in (None, False) for name in _NEEDS_TEXT.intersection(fields))


def _in_place_of_prompt(raw: bytes, ids: bytes) -> bytes:
    text = bytes(_prompt_of(raw).prompt)
    begins = text[:_TOLD_BY]
    at = raw.index(begins)
    ends = at + len(text)
    # Where the same stands twice, which of both is the prompt cannot be told so. One may begin with the other's last
    # quotation mark; no other mark in a text is without a backslash.
    if not raw.startswith(text, at) or raw.find(begins, ends - 1) >= 0:
        return raw
    return raw[:at] + ids + raw[ends:]


async def _as_json(packed: bytes) -> bytes:
    """Token ids, little-endian u32, as a JSON list."""
    ids = np.frombuffer(packed, "<u4")
    if len(ids) <= _STEP:
        return _encode(ids.tolist())
    steps = []
    for start in range(0, len(ids), _STEP):
        steps.append(_encode(ids[start : start + _STEP].tolist())[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(steps) + b"]"
