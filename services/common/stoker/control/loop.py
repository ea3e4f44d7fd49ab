"""Lead, watch, decide, write: the life of a deciding service."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import structlog
from google.protobuf.message import Message
from prometheus_client import Counter, Gauge, Histogram

from stoker.api.common.v1 import common_pb2
from stoker.common.backoff import Backoff
from stoker.common.errors import Code, StokerError
from stoker.control.config import LoopConfig
from stoker.control.core.trust import Sight, Trust
from stoker.registry.client import FleetEvent, FleetWatch, Leadership, RecordsChanged, SourceChanged
from stoker.registry.core.merge import FleetView
from stoker.registry.core.scaling import MAX_CALL_BYTES

log = structlog.get_logger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_UNANSWERED = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.ABORTED, Code.CANCELLED}

MAX_ITEMS = 100
"""Records that one fenced write may carry; the registry refuses more."""
_MAX_BYTES = MAX_CALL_BYTES * 9 // 10
"""Of these records; the rest is for what the registry adds."""

_LEADING = Gauge("stoker_control_leading", "1 while this process leads.", ["role"])
_HOLDING = Gauge("stoker_control_holding", "1 while this process leads but trusts its view too little.", ["role"])
_ROUNDS = Counter("stoker_control_rounds_total", "Rounds of a leader by outcome.", ["role", "outcome"])
_ROUND_SECONDS = Histogram("stoker_control_round_seconds", "Time of a round, writing included.", ["role"])


class Round(Protocol):
    """What a deciding service does with a view it can trust."""

    def hear(self, event: FleetEvent, now: float) -> bool:
        """Take note of an event; called for every one, leading or not. `now` is the loop's clock. True where a round
        should follow soon, as it does in any case where records changed."""

    def begin(self) -> None:
        """This process has just begun to lead: forget what was remembered from an earlier time."""

    def end(self) -> None:
        """This process leads no more: tell no more what only a leader knows."""

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        """Decide and write; returns the etcd revision of the last write, None where nothing had to be written."""


def candidate_name(config: LoopConfig) -> str:
    """The name under which this process stands for election: unique, and telling where it runs."""
    return config.candidate or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def pieces(items: Sequence[T], size: int = MAX_ITEMS) -> Iterator[Sequence[T]]:
    """`items` in slices of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def fitting(records: Iterable[M]) -> Iterator[list[M]]:
    """`records` in pieces that one fenced write may carry, by number and by bytes; taken as they are needed."""
    piece: list[M] = []
    size = 0
    for record in records:
        own = record.ByteSize()
        if piece and (len(piece) == MAX_ITEMS or size + own > _MAX_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(record)
        size += own
    if piece:
        yield piece


class ControlLoop:
    """Runs rounds while this process leads and trusts its view of the fleet.

    The view must come from a registry that vouches for it, and must show every earlier write: those of this
    leader, and those of the leaders before it. Otherwise the loop holds: nothing is decided, nothing written,
    and `holding` says why.
    """

    def __init__(
        self,
        role: str,
        config: LoopConfig,
        watch: FleetWatch,
        leadership: Leadership,
        round_: Round,
        rng: random.Random | None = None,
    ) -> None:
        self._role = role
        self._config = config
        self._watch = watch
        self._leadership = leadership
        self._round = round_
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=0.2, max_s=5.0)
        self._changed = asyncio.Event()
        self._freshness: dict[str, int] = {}
        self.holding = ""
        """Why a leader decides nothing now, in words; empty while it decides, or does not lead."""

    @property
    def leading(self) -> bool:
        """Whether this process leads, by its own clock."""
        return self._leadership.fence is not None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name=f"{self._role}: listen")
            tasks.create_task(self._stand(), name=f"{self._role}: lead")

    async def _listen(self) -> None:
        clock = asyncio.get_running_loop().time
        async for event in self._watch.events():
            if isinstance(event, SourceChanged):
                self._note_source(event)
            if self._round.hear(event, clock()) or isinstance(event, RecordsChanged):
                self._changed.set()

    def _note_source(self, event: SourceChanged) -> None:
        if event.connected and event.freshness is not None:
            self._freshness[event.endpoint] = event.freshness.revision
        elif not event.connected:
            self._freshness.pop(event.endpoint, None)

    async def _stand(self) -> None:
        while True:
            fence = await self._leadership.wait_leading()
            _LEADING.labels(self._role).set(1)
            self._round.begin()
            try:
                await self._lead(fence)
            finally:
                _LEADING.labels(self._role).set(0)
                self._hold("")
                self._round.end()

    async def _lead(self, fence: common_pb2.Fence) -> None:
        """Rounds, until another leads or this process must assume so."""
        clock = asyncio.get_running_loop().time
        trust = Trust(self._config.stale_after_s, fence.revision)
        failures, not_before = 0, 0.0
        while self._leadership.fence == fence:
            now = clock()
            doubt = trust.doubt(self._sight(now), now)
            self._hold(doubt)
            if doubt:
                _ROUNDS.labels(self._role, "held").inc()
            elif clock() >= not_before:
                outcome = await self._one_round(fence, trust)
                _ROUNDS.labels(self._role, outcome).inc()
                if outcome in {"fenced", "unanswered"}:
                    # Fenced: the registry knows better than the local clock. Unanswered: the write may still be on
                    # its way, and only the end of this fence keeps it from landing on top of later ones.
                    await self._leadership.resign()
                    await self._leadership.start()
                    return
                failures = failures + 1 if outcome == "failed" else 0
                not_before = clock() + self._backoff.delay_s(failures - 1, self._rng) if failures else 0.0
            await self._until_next()

    async def _one_round(self, fence: common_pb2.Fence, trust: Trust) -> str:
        clock = asyncio.get_running_loop().time
        with _ROUND_SECONDS.labels(self._role).time():
            try:
                revision = await self._round.run(self._watch.view, fence, clock())
            except StokerError as error:
                log.warning("control.write_failed", role=self._role, reason=error.reason, error=error.message)
                trust.failed(clock())
                if error.reason in {"FENCED", "NOT_LEADER"}:
                    return "fenced"
                return "unanswered" if error.code in _UNANSWERED else "failed"
            except Exception:  # one bad round must not cost the process
                log.exception("control.round_failed", role=self._role)
                trust.failed(clock())
                return "failed"
        if revision is None:
            return "quiet"
        trust.wrote(revision)
        return "written"

    def _sight(self, now: float) -> Sight:
        return Sight(
            synced=self._watch.synced.is_set(),
            vouched=not self._watch.stale,
            age_s=min(self._watch.age_s(now).values()),
            revision=max(self._watch.view.revision, *self._freshness.values(), 0),
        )

    def _hold(self, doubt: str) -> None:
        if doubt != self.holding:
            log.info("control.holding" if doubt else "control.deciding", role=self._role, because=doubt)
        self.holding = doubt
        _HOLDING.labels(self._role).set(bool(doubt))

    async def _until_next(self) -> None:
        """Returns at the next tick, or `debounce_s` after the next change, or when leadership is lost."""
        lost = asyncio.ensure_future(self._leadership.lost.wait())
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({lost, changed}, timeout=self._config.tick_s, return_when=asyncio.FIRST_COMPLETED)
            if changed.done() and not lost.done():
                await asyncio.sleep(self._config.debounce_s)
        finally:
            # Not awaited: that would swallow a cancellation of this very task.
            lost.cancel()
            changed.cancel()
        self._changed.clear()
