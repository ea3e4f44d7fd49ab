"""What all routers of one measurement stand before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One engine."""

    url: str
    """Base URL of its OpenAI HTTP server."""
    events: str
    """ZeroMQ address where its KV events are published."""
    replay: str = ""
    """ZeroMQ address where missed events are had again; empty where they are not."""


@dataclass(frozen=True)
class Backends:
    """All engines, which are alike."""

    each: tuple[Backend, ...]
    model: str
    """The served name."""
    model_dir: str
    """Where its tokenizer lies."""
    block_size: int
    total_blocks: int
    max_batched_tokens: int = 8192

    @property
    def urls(self) -> list[str]:
        """Their base URLs."""
        return [backend.url for backend in self.each]
