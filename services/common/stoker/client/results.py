"""What a client gives back."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted by the engine; None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int | None

    @classmethod
    def of(cls, usage: common_pb2.Usage) -> Usage:
        """From the wire."""
        cached = usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None
        return cls(usage.prompt_tokens, usage.completion_tokens, cached)


@dataclass(frozen=True, slots=True)
class Served:
    """Who serves a request, and how it got there."""

    request_id: str
    replica_id: str
    reason: str
    """Why the router chose the replica; "alternative" where the chosen one failed."""
    predicted_cached_tokens: int | None
    relayed: bool
    """Its tokens come through a router."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came since the chunk before, of one choice."""

    text: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    """Empty while the choice goes on."""
    delta: inference_pb2.Delta
    """The whole message: logprobs, tool calls, reasoning."""

    @classmethod
    def of(cls, delta: inference_pb2.Delta) -> Chunk:
        """From the wire."""
        return cls(delta.text, delta.index, tuple(delta.token_ids), delta.finish_reason, delta)


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that has ended."""

    choices: tuple[Choice, ...]
    usage: Usage
    served: Served

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text if self.choices else ""


class Gathering:
    """The output of a stream so far, by choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self._finish: dict[int, str] = {}

    def add(self, delta: inference_pb2.Delta) -> None:
        """One more piece."""
        index = delta.index
        self.text[index] = self.text.get(index, "") + delta.text
        self.token_ids.setdefault(index, []).extend(delta.token_ids)
        if delta.finish_reason:
            self._finish[index] = delta.finish_reason

    def choices(self) -> tuple[Choice, ...]:
        """All choices, in order."""
        return tuple(
            Choice(self.text[index], tuple(self.token_ids[index]), self._finish.get(index, ""))
            for index in sorted(self.text)
        )
