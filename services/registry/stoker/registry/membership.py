"""One node's membership in etcd: its lease, its record and its members' statuses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable

import structlog

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.backoff import Backoff
from stoker.etcd import EtcdError, LeaseLost
from stoker.registry import metrics
from stoker.registry.config import MembershipConfig
from stoker.registry.nodes import NodeStore, Registered

log = structlog.get_logger(__name__)


class Membership:
    """Writes what one agent says to etcd, and renews the node's lease for as long as the agent is heard.

    With etcd lost it waits and goes on when etcd is back; a lease lost meanwhile is replaced, and everything
    known is written again. `welcome` is called with the lease whenever the agent is to be told of it, 0 for none.
    """

    def __init__(
        self,
        store: NodeStore,
        config: MembershipConfig,
        hello: registry_pb2.Hello,
        known: Callable[[], Iterable[tuple[str, int]]],
        welcome: Callable[[int], None],
        rng: random.Random,
    ) -> None:
        self.node = hello.node
        self.members = {(status.replica_id, status.rank): status for status in hello.members}
        """Newest status of each member of the node."""
        self._store = store
        self._config = config
        self._known = known
        self._welcome = welcome
        self._rng = rng
        self._hint = hello.lease_id
        self._registered: Registered | None = None
        self._dirty: set[tuple[str, int]] = set()
        self._gone: set[tuple[str, int]] = set()
        # Of each member's last write.
        self._revisions: dict[tuple[str, int], int] = {}
        self._doubted = False
        self._leaving = False
        self._heard = True
        self._wake = asyncio.Event()
        self._backoff = Backoff(first_s=0.1, max_s=1.0)

    # What the agent says; none of this waits

    def heard(self) -> None:
        """The agent lives."""
        self._heard = True

    def introduce(self, hello: registry_pb2.Hello) -> None:
        """The agent describes itself anew on the same stream."""
        self.node = hello.node
        self.members = {(status.replica_id, status.rank): status for status in hello.members}
        self._dirty.clear()
        self._gone.clear()
        self._forget_registration()

    def member(self, status: records_pb2.MemberStatus) -> None:
        """A member's newest status."""
        key = (status.replica_id, status.rank)
        self.members[key] = status
        self._dirty.add(key)
        self._gone.discard(key)
        self._wake.set()

    def member_gone(self, key: tuple[str, int]) -> None:
        """A member exists no more."""
        self.members.pop(key, None)
        self._dirty.discard(key)
        self._gone.add(key)
        self._wake.set()

    def doubt(self) -> None:
        """The node's record was written or went: look whether it is still ours."""
        self._doubted = True
        self._wake.set()

    # What becomes of it

    async def run(self) -> None:
        """Keep etcd in step, for ever. Raises Superseded or Moved when the agent belongs elsewhere."""
        loop = asyncio.get_running_loop()
        renew_s = self._config.lease_ttl_s / 3
        renew_at = loop.time() + renew_s
        failures = 0
        patience = loop.call_later(self._config.welcome_patience_s, self._admit_anyway)
        try:
            while True:
                self._wake.clear()
                try:
                    await self._write()
                    if loop.time() >= renew_at:
                        await self._renew(renew_s)
                        renew_at = loop.time() + renew_s
                except EtcdError as error:
                    # Said once an outage: there may be thousands of nodes.
                    if failures == 0:
                        log.warning(
                            "membership.unwritten", node=self.node.node_id, reason=error.reason, error=error.message
                        )
                    await asyncio.sleep(self._backoff.delay_s(failures, self._rng))
                    failures += 1
                    continue
                if failures:
                    log.info("membership.written_again", node=self.node.node_id, failures=failures)
                    failures = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(renew_at):
                        await self._wake.wait()
        finally:
            patience.cancel()

    def _admit_anyway(self) -> None:
        """Etcd is away: let the agent's load and digests flow, and tell it the lease when there is one."""
        if self._registered is None:
            self._welcome(self._hint)

    async def leave(self) -> None:
        """End the membership at once; raises EtcdError when etcd does not answer, then the lease ends it."""
        self._leaving = True
        if self._registered is not None:
            await self._store.leave(self.node, self._registered)
            self._registered = None

    async def _write(self) -> None:
        if self._leaving:
            return
        if self._doubted and self._registered is not None:
            self._doubted = False
            try:
                ours = await self._store.still_ours(self.node, self._registered)
                self._revisions |= await self._store.member_revisions(self._dirty | self._gone)
            except EtcdError:
                self._doubted = True
                raise
            if not ours:
                self._lost("record gone")
        if self._registered is None:
            await self._register()
        elif self._dirty or self._gone:
            await self._write_members(self._registered)

    async def _register(self) -> None:
        node, members = self.node, dict(self.members)
        dirty, self._dirty, gone, self._gone = self._dirty, set(), self._gone, set()
        try:
            registered = await self._store.register(node, list(members.values()), self._hint, self._known)
        except BaseException:
            self._dirty |= dirty & self.members.keys()
            self._gone |= gone - self.members.keys()
            raise
        if node is not self.node:
            # Introduced anew while this was written: write that too.
            self._hint = registered.lease_id
            self._wake.set()
            return
        self._registered, self._hint, self._doubted = registered, registered.lease_id, False
        self._revisions = dict.fromkeys(((m.replica_id, m.rank) for m in members.values()), registered.revision)
        self._welcome(registered.lease_id)
        log.info("membership.registered", node=node.node_id, lease=f"{registered.lease_id:x}")

    async def _write_members(self, registered: Registered) -> None:
        dirty, self._dirty, gone, self._gone = self._dirty, set(), self._gone, set()
        revision = None
        try:
            statuses = [self.members[key] for key in dirty if key in self.members]
            revision = await self._store.write_members(self.node, registered, statuses, list(gone), self._revisions)
        finally:
            if revision is None:
                # Not written, or nobody knows: look before writing again.
                self._dirty |= dirty & self.members.keys()
                self._gone |= gone - self.members.keys()
                self.doubt()
            else:
                self._revisions |= dict.fromkeys(dirty, revision) | dict.fromkeys(gone, 0)

    async def _renew(self, timeout_s: float) -> None:
        # An agent that is not heard is let go: its lease ends unless another registry hears it.
        if self._registered is None or not self._heard:
            return
        self._heard = False
        try:
            await self._store.renew(self._registered.lease_id, timeout_s)
            metrics.LEASE_RENEWALS.inc()
        except LeaseLost:
            metrics.LEASE_FAILURES.labels("lost").inc()
            self._lost("lease lost")
        except EtcdError:
            metrics.LEASE_FAILURES.labels("etcd").inc()
            self._heard = True
            raise

    def _lost(self, because: str) -> None:
        log.warning("membership.lost", node=self.node.node_id, because=because)
        self._forget_registration()

    def _forget_registration(self) -> None:
        self._registered = None
        self._wake.set()
