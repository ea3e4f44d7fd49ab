"""Staying leader of a role, and knowing at once when no more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.common.backoff import Backoff
from stoker.common.errors import StokerError
from stoker.registry.client.calls import RegistryClient

log = structlog.get_logger(__name__)


class Leadership:
    """Tries to lead `role` in the background and, once leading, stays leader.

    `candidate` must be unique per process. `ttl_s` (1 to 60 s) bounds how long a dead leader blocks the next.
    Use it as an async context manager: leaving it resigns.
    """

    def __init__(
        self,
        client: RegistryClient,
        role: str,
        candidate: str,
        ttl_s: float = 10.0,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._role = role
        self._candidate = candidate
        self._ttl_s = ttl_s
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=min(0.2, ttl_s / 10), max_s=ttl_s / 3)
        self._fence: common_pb2.Fence | None = None
        self._lease_id = 0
        self._deadline = 0.0
        self._leading = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        """Set whenever this candidate does not lead; cleared while it does."""
        self.lost.set()
        self.leader = ""
        """Who leads, as last heard; empty while unknown."""

    @property
    def fence(self) -> common_pb2.Fence | None:
        """The right to write; None as soon as the local monotonic deadline has passed, whatever the tasks do."""
        if self._fence is not None and asyncio.get_running_loop().time() < self._deadline:
            return self._fence
        return None

    async def wait_leading(self) -> common_pb2.Fence:
        """Wait, however long, until this candidate leads; returns the fence."""
        while True:
            await self._leading.wait()
            if (fence := self.fence) is not None:
                return fence
            # Over by the clock, but the background task has not run yet.
            await asyncio.sleep(0)

    async def start(self) -> None:
        """Start to try."""
        self._task = asyncio.create_task(self._run(), name=f"leadership of {self._role}")

    async def resign(self) -> None:
        """Stop trying, and step down where it leads; never raises for a registry that does not answer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        fence, lease_id = self._fence, self._lease_id
        self._drop("resigned")
        if fence is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._client.resign_leadership(fence, lease_id)
            except (StokerError, TimeoutError) as error:
                log.info("leadership.resign_unheard", role=self._role, error=str(error))

    async def __aenter__(self) -> Leadership:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.resign()

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                if self._fence is not None:
                    await self._hold()
                acquired = await self._try_acquire()
            except Exception:  # a candidate that stops trying would never lead again, and nobody would notice
                log.exception("leadership.failed", role=self._role, candidate=self._candidate)
                acquired = False
            attempt = 0 if acquired else attempt + 1
            if not acquired:
                await asyncio.sleep(self._backoff.delay_s(attempt, self._rng))

    async def _try_acquire(self) -> bool:
        now = asyncio.get_running_loop().time
        sent = now()
        try:
            response = await self._client.acquire_leadership(self._role, self._candidate, self._ttl_s)
        except StokerError as error:
            if error.reason == "NOT_LEADER":
                self.leader = error.metadata.get("leader", "")
            else:
                log.warning("leadership.acquire_failed", role=self._role, reason=error.reason, error=error.message)
            return False
        self._fence, self._lease_id = response.fence, response.lease_id
        self._deadline = sent + response.ttl_ms / 1000
        self.leader = self._candidate
        self.lost.clear()
        self._leading.set()
        log.info("leadership.gained", role=self._role, candidate=self._candidate, revision=response.fence.revision)
        return True

    async def _hold(self) -> None:
        """Renew until it is over."""
        now: Callable[[], float] = asyncio.get_running_loop().time
        fence = self._fence
        assert fence is not None  # noqa: S101 - only called while holding one
        pause = self._ttl_s / 3
        while (left := self._deadline - now()) > 0:
            await asyncio.sleep(min(pause, left))
            sent = now()
            if sent >= self._deadline:
                break
            try:
                ttl_s = await self._client.renew_leadership(
                    fence, self._lease_id, timeout_s=min(self._ttl_s / 2, self._deadline - sent)
                )
            except StokerError as error:
                log.warning("leadership.renew_failed", role=self._role, reason=error.reason, error=error.message)
                if error.reason in {"NOT_LEADER", "FENCED"}:
                    return self._drop(error.message)
                pause = self._ttl_s / 20
            else:
                self._deadline = sent + ttl_s
                pause = self._ttl_s / 3
        self._drop("no renewal was answered within its time to live")
        return None

    def _drop(self, because: str) -> None:
        if self._fence is not None:
            log.warning("leadership.lost", role=self._role, candidate=self._candidate, because=because)
        self._fence, self._lease_id, self.leader = None, 0, ""
        self._leading.clear()
        self.lost.set()
