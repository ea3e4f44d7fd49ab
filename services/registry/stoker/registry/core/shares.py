"""Streams that one host may hold of all that there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Shares:
    """Counts streams by host, so that one host, or a client gone wrong on it, cannot take them all."""

    total: int
    """Streams at once, all hosts together."""
    by_host: int
    """Streams at once of one host."""
    _held: Counter[str] = field(default_factory=Counter)

    def refusal(self, host: str) -> str:
        """Why `host` may have no further stream, in words; empty where it may."""
        if self._held.total() >= self.total:
            return f"{self._held.total()} are open, the most that this registry serves; use another"
        if self._held[host] >= self.by_host:
            return f"{self._held[host]} from {host} are open, the most that one host may hold; close some"
        return ""

    def take(self, host: str) -> None:
        """One more."""
        self._held[host] += 1

    def give_back(self, host: str) -> None:
        """One less."""
        self._held[host] -= 1
        if not self._held[host]:
            del self._held[host]
