"""Passive health: which replicas to leave alone for a while because requests to them fail.

A replica is ejected after consecutive failures, returns after a pause that doubles with each relapse, and
no more than a share of the fleet is out at once: when many fail together, the fault is rarely theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """How a call to a replica ended, as far as the replica's health is concerned."""

    OK = "ok"
    FAULT = "fault"  # connect error, reset, timeout, 5xx
    CALLER = "caller"  # 4xx or cancelled: says nothing about the replica


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a replica is ejected and for how long."""

    failures: int = 3
    """Consecutive faults that eject."""
    pause_s: float = 5.0
    """The first ejection's length; doubles with each one that follows without a success between."""
    pause_max_s: float = 60.0
    max_share: float = 0.34
    """The most of the fleet that may be out at once; one replica always may, unless it is the only one."""


@dataclass(slots=True)
class _Record:
    failures: int = 0
    ejections: int = 0
    until: float = float("-inf")


class Health:
    """Ejection state of a pool's replicas, fed with outcomes."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self._config = config or HealthConfig()
        self._records: dict[str, _Record] = {}

    def observe(self, replica: str, outcome: Outcome, fleet: Collection[str], now: float) -> bool:
        """Record an outcome; True when it ejects the replica. `fleet` is every replica id of the pool."""
        if outcome is Outcome.CALLER:
            return False
        if outcome is Outcome.OK:
            self._records.pop(replica, None)
            return False
        record = self._records.setdefault(replica, _Record())
        record.failures += 1
        if record.failures < self._config.failures or now < record.until:
            return False
        if not self._may_eject(fleet, now):
            return False
        pause = min(self._config.pause_max_s, self._config.pause_s * 2.0 ** min(record.ejections, 16))
        record.until = now + pause
        record.ejections += 1
        # One more fault after the pause ejects again; one success clears the record.
        record.failures = self._config.failures - 1
        return True

    @property
    def quiet(self) -> bool:
        """Whether no replica has a fault on record: nothing can be ejected."""
        return not self._records

    def ejected(self, replica: str, now: float) -> bool:
        """Whether a replica is out at `now`."""
        record = self._records.get(replica)
        return record is not None and now < record.until

    def out(self, now: float) -> frozenset[str]:
        """Return the replicas that are out at `now`."""
        return frozenset(replica for replica, record in self._records.items() if now < record.until)

    def forget(self, replica: str) -> None:
        """Drop a replica that left the fleet or came back as a new process."""
        self._records.pop(replica, None)

    def _may_eject(self, fleet: Collection[str], now: float) -> bool:
        out = sum(1 for replica in fleet if self.ejected(replica, now))
        return out + 1 <= max(1, int(self._config.max_share * len(fleet))) and len(fleet) > 1
