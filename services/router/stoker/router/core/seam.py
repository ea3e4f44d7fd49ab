"""Where an answer that broke off is taken up again by another replica, and whether it can be.

The other replica gets the prompt and the tokens that were said, as one prompt. What it then says is what the first
would have, where sampling sees no difference between said and given tokens: these rules name where that is so.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Continuation = Literal["never", "greedy", "sampled"]

LONGEST = 131_072
"""Tokens (and four times as many characters) of one answer that are kept; a longer one is not continued."""
_MOST_STOP_CHARS = 4096  # in all; they are looked for at each piece of the rest

PASSED = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "logit_bias", "skip_special_tokens", "allowed_token_ids",
    "cache_salt", "priority", "user",
})  # fmt: skip
"""Mean the same for the rest of an answer as for the whole."""
_REPLACED = frozenset({
    "prompt", "messages", "text", "token_ids", "chat", "max_tokens", "max_completion_tokens", "min_tokens", "stream",
    "stream_options", "return_token_ids", "add_special_tokens",
})  # fmt: skip
_RENDERED = frozenset({
    "chat_template_kwargs", "template_kwargs", "reasoning_effort", "add_generation_prompt", "omit_generation_prompt",
    "continue_final_message", "documents", "prompt_cache_key", "session_id", "request_id", "replica_id", "metadata",
    "store", "service_tier", "safety_identifier", "parallel_tool_calls",
})  # fmt: skip
"""Have done their work when the prompt is there, or are no matter of sampling."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", ""),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
}
"""Change nothing with these values."""


def greedy(fields: Mapping[str, Any]) -> bool:
    """Whether every token is the likeliest one."""
    temperature = fields.get("temperature")
    return isinstance(temperature, int | float) and temperature < 1e-5


def obstacle(fields: Mapping[str, Any], allowed: Continuation) -> str:
    """The name of the field (or `policy`) that keeps an answer from being continued; empty where none does.

    `fields` are those that the request sets, by vLLM's names. One that is not known here is an obstacle.
    """
    if allowed == "never" or (allowed == "greedy" and not greedy(fields)):
        return "policy"
    if fields.get("seed") is not None and not greedy(fields):
        return "seed"  # the engine's generator would begin anew: neither the seed's answer nor a fair sample
    if _chars(fields.get("stop")) > _MOST_STOP_CHARS:
        return "stop"
    if fields.get("stop") and fields.get("min_tokens"):
        return "min_tokens"  # until then stop texts are not looked for
    tools_shown_alone = fields.get("tool_choice") == "none"
    for name, value in fields.items():
        if value is None or value in ("", [], {}, ()) or _is_neutral(name, value):
            continue
        if name == "tools" and tools_shown_alone:
            continue
        if name in _NEUTRAL or not (name in PASSED or name in _REPLACED or name in _RENDERED):
            return name
    return ""


def _chars(stop: object) -> int:
    """Of all stop texts; what else there may be the engine refuses."""
    if isinstance(stop, str):
        return len(stop)
    return sum(1 + len(each) for each in stop if isinstance(each, str)) if isinstance(stop, Iterable) else 0


def _is_neutral(name: str, value: object) -> bool:
    # Zero is not False here: `logprobs: 0` asks for the sampled token's.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL.get(name, ()))


@dataclass(slots=True)
class Said:
    """What of an answer has gone to its reader."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    texts: list[str] = field(default_factory=list)
    finished: bool = False
    """The engine has said why it ended; only the end of the stream is missing."""
    broken: str = ""
    """Why this answer cannot be continued; empty while it can."""
    _chars: int = 0

    def add(self, text: str, tokens: Iterable[int], *, finished: bool = False) -> None:
        """Note a piece: its text, and the tokens that the engine had chosen by then."""
        if self.broken:
            return
        self.tokens.extend(tokens)
        if text:
            self.texts.append(text)
            self._chars += len(text)
        if text and not self.tokens:
            self.spoil("no_tokens")
        elif len(self.tokens) > LONGEST or self._chars > 4 * LONGEST:
            self.spoil("too_long")
        self.finished = self.finished or finished

    @property
    def text(self) -> str:
        """All that went out."""
        return "".join(self.texts)

    def spoil(self, why: str) -> None:
        """This answer is not to be continued; nothing more is kept of it."""
        self.broken = self.broken or why
        self.tokens, self.texts = array("I"), []


@dataclass(frozen=True, slots=True)
class Seam:
    """How many of the tokens said go into the new prompt, and the text of those that the reader has not got yet."""

    kept: int
    before: str
    """The text of the tokens kept."""
    sent: int
    """Characters of it that the reader has."""


def seam(pieces: Sequence[str], sent: str) -> Seam | None:
    """Find where to go on; None where `sent` is not what the tokens say.

    `pieces` is the text that each token said adds, empty where it adds none: a special token, or a part of a
    character. Such tokens at the end are said anew, since their text was not sent.
    """
    kept = len(pieces)
    while kept and not pieces[kept - 1]:
        kept -= 1
    before = "".join(pieces[:kept])
    return Seam(kept, before, len(sent)) if before.startswith(sent) else None


class Stops:
    """Looks for stop texts that begin before a seam and end behind it.

    The engine that continues sees its own part alone. What may turn out to begin such a text is held back.
    """

    def __init__(self, where: Seam, stops: Sequence[str], *, include: bool) -> None:
        self._text = where.before
        self._at = len(where.before)
        self._out = where.sent
        self._stops = stops
        self._include = include
        self._watching = True
        self.met = ""
        """The stop text that was met; then the answer ends."""

    def feed(self, piece: str) -> str:
        """The text that may go out now."""
        if not self._watching:
            return piece
        self._text += piece
        met = min(
            ((at, stop) for stop in self._stops if (at := self._straddles(stop)) >= 0),
            default=None,
            key=lambda m: m[0],
        )
        if met is not None:
            at, self.met = met
            self._watching = False
            return self._text[self._out : at + len(self.met) * self._include]
        held = max((self._begun(stop) for stop in self._stops), default=0)
        self._watching = held > 0
        until = max(self._out, len(self._text) - held)
        piece, self._out = self._text[self._out : until], until
        return piece

    def rest(self) -> str:
        """What is held back, when the answer ends otherwise."""
        if not self._watching:
            return ""
        self._watching = False
        return self._text[self._out :]

    def _straddles(self, stop: str) -> int:
        first = max(0, self._at - len(stop) + 1)
        at = self._text.find(stop, first, self._at + len(stop))
        return at if 0 <= at < self._at < at + len(stop) else -1

    def _begun(self, stop: str) -> int:
        """The length of the longest beginning of `stop` at the end of the text that starts before the seam."""
        for at in range(max(0, len(self._text) - len(stop) + 1), min(self._at, len(self._text))):
            if stop.startswith(self._text[at:]):
                return len(self._text) - at
        return 0
