"""What all stores share: reads of one moment, transactions that are safe to send twice, or to run late."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from stoker.common.errors import Code, StokerError
from stoker.etcd import Ambiguous, Compare, EtcdClient, EtcdUnavailable, Get, KeyValue, Op, TxnResult

log = structlog.get_logger(__name__)

TRIES = 8
"""Tries of a read, decide, compare and write before giving up."""


async def read(etcd: EtcdClient, keys: Sequence[str]) -> list[KeyValue | None]:
    """Keys as of one moment; None for each that is absent."""
    result = await repeat(etcd, [], [Get(key) for key in keys])
    return [response.kvs[0] if response.kvs else None for response in result.responses]


async def repeat(etcd: EtcdClient, compare: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
    """A transaction that does the same when sent twice, sent again when its answer is lost."""
    try:
        return await etcd.txn(compare, then)
    except Ambiguous:
        return await etcd.txn(compare, then)


async def revoke(etcd: EtcdClient, lease_id: int) -> None:
    """End a lease that has no use any more; without etcd it ends by itself."""
    try:
        await etcd.revoke(lease_id)
    except EtcdUnavailable as error:
        log.info("lease.left_to_expire", lease=f"{lease_id:x}", error=error.message)


def at(key: str, revision: int) -> KeyValue:
    """A key as last written at `revision`, 0 for one that is absent, to compare with."""
    return KeyValue(key, b"", 0, revision, 0)


def as_read(key: str, existing: KeyValue | None) -> Compare:
    """The key is still as it was read."""
    return Compare.absent(key) if existing is None else Compare.unchanged(existing)


def contention(what: str) -> StokerError:
    """Others were faster each time."""
    return StokerError(
        f"{what} was changed by others {TRIES} times in a row; try again",
        code=Code.ABORTED,
        reason="CONTENTION",
        retry_after_s=0.5,
    )
