"""The client: keys, transactions, and the way to leases and watches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from stoker.etcd import wire
from stoker.etcd.core.failure import Kind
from stoker.etcd.core.types import Compare, KeyValue, Op, RangeResult, TxnResult
from stoker.etcd.errors import EtcdRejected, EtcdTooLarge
from stoker.etcd.lease import Lease, Renewals
from stoker.etcd.transport import CallFailed, Connection, Tls, Transport, unary
from stoker.etcd.watch import Watch, WatchTimes

# Keys to a page of a range: with values of some KiB a page stays far below the message limit.
_PAGE_KEYS = 512


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one member says of itself; `leader` is the leader's member id, 0 when it knows none."""

    endpoint: str
    member_id: int
    leader: int
    revision: int
    version: str
    db_size_bytes: int


class EtcdClient:
    """An etcd client over several endpoints ("host:port").

    `call_timeout_s` bounds each call over all its tries. `attempt_timeout_s` bounds one try of a call that
    is safe to repeat. Reads are linearizable. Must be used from one event loop.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        call_timeout_s: float = 5.0,
        attempt_timeout_s: float = 2.0,
        watch_times: WatchTimes | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise EtcdRejected("etcd endpoints: the list is empty; give at least one host:port")
        self.endpoints = tuple(endpoints)
        self._tls = tls
        self._timeout = call_timeout_s
        self._attempt_timeout = attempt_timeout_s
        self._watch_times = watch_times or WatchTimes()
        self._rng = rng or random.Random()  # noqa: S311 - jitter and lease ids, not secrets
        self._transport_or_none: Transport | None = None
        self._renewals: Renewals | None = None
        self._watches: set[Watch] = set()
        self._leases: set[Lease] = set()

    async def connect(self) -> None:
        """Open the channels and wait for one answer; EtcdUnavailable when none comes in `call_timeout_s`."""
        self._transport_or_none = Transport(
            self.endpoints, self._tls, attempt_timeout_s=self._attempt_timeout, rng=self._rng
        )
        self._renewals = Renewals(self._transport_or_none)
        try:
            await self.get("\0")
        except BaseException:
            await self.close()
            raise

    def renew(self, tls: Tls) -> None:
        """Use other certificates from now on, without a break: calls under way end, watches and leases go on."""
        self._tls = tls
        if self._transport_or_none is not None:
            self._transport_or_none.renew(tls)

    async def close(self) -> None:
        """End watches and background renewals, and close the channels. Leases are left to expire."""
        for watch in tuple(self._watches):
            await watch.close()
        for lease in tuple(self._leases):
            await lease.stop()
        if self._renewals is not None:
            await self._renewals.close()
            self._renewals = None
        if self._transport_or_none is not None:
            await self._transport_or_none.close()
            self._transport_or_none = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Keys

    async def get(self, key: str, *, revision: int = 0, timeout: float | None = None) -> KeyValue | None:
        """The key, or None when it is absent; at `revision` when that is given (Compacted if too old)."""
        request = wire.rpc.RangeRequest(**wire.span(key, prefix=False), revision=revision)
        response = await self._kv("get", "Range", request, idempotent=True, timeout=timeout)
        return wire.key_value(response.kvs[0]) if response.kvs else None

    async def range(self, prefix: str, *, revision: int = 0, timeout: float | None = None) -> RangeResult:
        """Every key under `prefix`, of one revision, in key order; read in pages, whatever their number.

        `timeout` bounds each page. Raises Compacted when `revision`, or that of the first page, is gone.
        """
        fields = wire.span(prefix, prefix=True)
        kvs: list[KeyValue] = []
        limit = _PAGE_KEYS
        while True:
            request = wire.rpc.RangeRequest(**fields, revision=revision, limit=limit)
            try:
                page = await self._kv("range", "Range", request, idempotent=True, timeout=timeout)
            except EtcdTooLarge:
                if limit == 1:
                    raise
                limit //= 2
                continue
            kvs.extend(wire.key_value(kv) for kv in page.kvs)
            # Later pages read the past of the first, so that together they are one moment.
            revision = revision or page.header.revision
            if not page.more:
                return RangeResult(revision, tuple(kvs))
            fields["key"] = page.kvs[-1].key + b"\0"

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        lease: int = 0,
        idempotent: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Write a key; returns the revision of the write.

        Without `idempotent` a lost answer raises Ambiguous; with it the write is sent again. Say it only of
        a value that never changes: a copy held up in a frozen member may be applied seconds after this
        returned, over whatever was written since. What changes is written by a `txn` that compares.
        LeaseLost when `lease` is gone.
        """
        request = wire.rpc.PutRequest(key=wire.encode(key), value=value, lease=lease)
        response = await self._kv("put", "Put", request, idempotent=idempotent, timeout=timeout)
        return int(response.header.revision)

    async def delete(
        self, key: str, *, prefix: bool = False, idempotent: bool = False, timeout: float | None = None
    ) -> int:
        """Delete a key, or all under a prefix; returns how many there were.

        `idempotent` as for `put`: only of keys that are never created again.
        """
        request = wire.rpc.DeleteRangeRequest(**wire.span(key, prefix))
        response = await self._kv("delete", "DeleteRange", request, idempotent=idempotent, timeout=timeout)
        return int(response.deleted)

    async def txn(
        self,
        compare: Sequence[Compare] = (),
        then: Sequence[Op] = (),
        otherwise: Sequence[Op] = (),
        *,
        timeout: float | None = None,
    ) -> TxnResult:
        """Run `then` if every comparison holds, else `otherwise`, as one step.

        Never repeated once it may have reached etcd: a lost answer raises Ambiguous.
        """
        request = wire.rpc.TxnRequest(
            compare=[wire.compare(condition) for condition in compare],
            success=[wire.request_op(op) for op in then],
            failure=[wire.request_op(op) for op in otherwise],
        )
        response = await self._kv("txn", "Txn", request, idempotent=False, timeout=timeout)
        return TxnResult(
            succeeded=response.succeeded,
            revision=response.header.revision,
            responses=tuple(wire.op_result(each) for each in response.responses),
        )

    # Leases

    async def grant(self, ttl_s: int, *, timeout: float | None = None) -> int:
        """Grant a lease and return its id, without renewing it. etcd may raise a TTL that is too short."""
        lease = await self._grant(ttl_s, timeout)
        return lease[0]

    async def lease(self, ttl_s: int, *, timeout: float | None = None) -> Lease:
        """Grant a lease and renew it in the background until `stop`, `revoke`, `close` or its loss."""
        lease_id, sent, ttl = await self._grant(ttl_s, timeout)
        return self._hold(lease_id, sent, ttl)

    async def adopt(self, lease_id: int) -> Lease:
        """Renew in the background a lease that someone else granted; LeaseLost when it is gone."""
        sent = self._renewing.now()
        ttl = await self.keep_alive_once(lease_id)
        return self._hold(lease_id, sent, ttl)

    async def keep_alive_once(self, lease_id: int, *, timeout: float | None = None) -> float:
        """Renew any lease once and return its TTL, seconds; LeaseLost when it is gone.

        Renewals of all leases share one stream: thousands at once are fine.
        """
        return await self._renewing.once(lease_id, timeout or self._timeout)

    async def revoke(self, lease_id: int, *, timeout: float | None = None) -> None:
        """End a lease and delete its keys; quietly nothing when it is gone already."""
        request = wire.rpc.LeaseRevokeRequest(ID=lease_id)

        async def attempt(connection: Connection, seconds: float) -> None:
            try:
                await unary(connection.lease.LeaseRevoke, request, seconds)
            except CallFailed as error:
                if error.failure.kind is not Kind.LEASE_GONE:
                    raise

        await self._transport.call("revoke", attempt, timeout=timeout or self._timeout, idempotent=True)

    async def time_to_live(self, lease_id: int, *, timeout: float | None = None) -> float | None:
        """Seconds the lease has left by the leader's clock, or None when it is gone."""
        request = wire.rpc.LeaseTimeToLiveRequest(ID=lease_id)

        async def attempt(connection: Connection, seconds: float) -> Any:
            return await unary(connection.lease.LeaseTimeToLive, request, seconds)

        call_s = timeout or self._timeout
        response = await self._transport.call("time to live", attempt, timeout=call_s, idempotent=True)
        return float(response.TTL) if response.TTL >= 0 else None

    # Watches

    def watch_prefix(self, prefix: str) -> Watch:
        """Watch every key under `prefix`: a Snapshot first, then Deltas, for ever. Starts at once."""
        watch = Watch(self._transport, self.range, prefix, self._watch_times)
        self._watches.add(watch)
        watch.on_close(self._watches.discard)
        return watch

    # Operations

    async def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """Drop history before `revision`; quietly nothing when that was done already."""
        request = wire.rpc.CompactionRequest(revision=revision, physical=True)

        async def attempt(connection: Connection, seconds: float) -> None:
            try:
                await unary(connection.kv.Compact, request, seconds)
            except CallFailed as error:
                if error.failure.kind is not Kind.COMPACTED:
                    raise

        await self._transport.call("compact", attempt, timeout=timeout or self._timeout, idempotent=True)

    async def status(self, *, timeout: float | None = None) -> MemberStatus:
        """What the member now in use says of itself."""

        async def attempt(connection: Connection, seconds: float) -> MemberStatus:
            answer = await unary(connection.maintenance.Status, wire.rpc.StatusRequest(), seconds)
            return MemberStatus(
                endpoint=connection.address,
                member_id=answer.header.member_id,
                leader=answer.leader,
                revision=answer.header.revision,
                version=answer.version,
                db_size_bytes=answer.dbSize,
            )

        return await self._transport.call("status", attempt, timeout=timeout or self._timeout, idempotent=True)

    @property
    def _transport(self) -> Transport:
        if self._transport_or_none is None:
            raise RuntimeError("EtcdClient is not connected: use `async with`, or await connect() first")
        return self._transport_or_none

    @property
    def _renewing(self) -> Renewals:
        if self._renewals is None:
            raise RuntimeError("EtcdClient is not connected: use `async with`, or await connect() first")
        return self._renewals

    async def _kv(self, what: str, method: str, request: Any, *, idempotent: bool, timeout: float | None) -> Any:
        async def attempt(connection: Connection, seconds: float) -> Any:
            return await unary(getattr(connection.kv, method), request, seconds)

        return await self._transport.call(what, attempt, timeout=timeout or self._timeout, idempotent=idempotent)

    async def _grant(self, ttl_s: int, timeout: float | None) -> tuple[int, float, float]:
        """Grant under an id chosen here, so that repeating it is harmless: (id, first send time, TTL)."""
        lease_id = self._rng.getrandbits(62) + 1
        sent = self._renewing.now()
        request = wire.rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)

        async def attempt(connection: Connection, seconds: float) -> float:
            try:
                return float((await unary(connection.lease.LeaseGrant, request, seconds)).TTL)
            except CallFailed as error:
                # An earlier try of this very call got through.
                if error.failure.kind is Kind.LEASE_EXISTS:
                    return float(ttl_s)
                raise

        ttl = await self._transport.call("grant lease", attempt, timeout=timeout or self._timeout, idempotent=True)
        return lease_id, sent, ttl

    def _hold(self, lease_id: int, sent: float, ttl: float) -> Lease:
        lease = Lease(self._renewing, lease_id, sent, ttl, revoke=self.revoke)
        self._leases.add(lease)
        lease.on_stop(self._leases.discard)
        return lease
