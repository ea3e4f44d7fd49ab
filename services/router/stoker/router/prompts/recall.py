"""Bodies that were read before: the same bytes need no second parse, template, tokenizing or hashing."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from stoker.router.prompts.plan import Basis, Plan

_REMEMBERED_BYTES = 64 * 1024 * 1024
_LONGEST_BYTES = 1024 * 1024
"""Longer ones take longer to recognize than a request should hold up others."""
_KEY_BYTES = 40
_ENTRY_BYTES = 1024
"""Of what is kept beside the body and the keys, by measurement, rounded up: most bodies are no longer."""
_KEPT_S = 300.0
"""Templates may show the date: what was rendered is not the prompt for ever."""


@dataclass(frozen=True, slots=True)
class Known:
    """A body, and what was made of it."""

    body: bytes
    model: str
    stream: bool
    priority: int
    plan: Plan
    """Nobody's: no tenant is charged for it."""
    basis: Basis
    """What the plan rests on."""
    at: float
    """When it was made, monotonic seconds."""

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return _ENTRY_BYTES + len(self.body) + len(self.plan.ids) + _KEY_BYTES * len(self.plan.request.keys)


class Recall:
    """Remembers the bodies last seen, up to so many bytes of them and of their keys."""

    def __init__(self, limit: int = _REMEMBERED_BYTES) -> None:
        self._limit = limit
        self._size = 0
        self._known: OrderedDict[tuple[str, int], Known] = OrderedDict()
        # Nobody shall make two bodies that push each other out.
        self._seed = secrets.randbits(64)

    def __len__(self) -> int:
        return len(self._known)

    def find(self, api: str, body: bytes, now: float) -> Known | None:
        """What is known of a body, byte for byte."""
        if len(body) > _LONGEST_BYTES:
            return None
        key = self._key(api, body)
        known = self._known.get(key)
        if known is None or known.body != body or now - known.at > _KEPT_S:
            return None
        self._known.move_to_end(key)
        return known

    def note(self, api: str, known: Known) -> None:
        """Remember a body."""
        if known.size > min(self._limit, 2 * _LONGEST_BYTES) or len(known.body) > _LONGEST_BYTES:
            return
        key = self._key(api, known.body)
        before = self._known.pop(key, None)
        self._known[key] = known
        self._size += known.size - (before.size if before is not None else 0)
        while self._size > self._limit:
            _, oldest = self._known.popitem(last=False)
            self._size -= oldest.size

    def _key(self, api: str, body: bytes) -> tuple[str, int]:
        return api, xxhash.xxh3_64_intdigest(body, self._seed)
