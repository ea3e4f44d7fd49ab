"""A thin, asynchronous etcd v3 layer with a watch that survives compaction.

    from stoker.etcd import Compare, EtcdClient, Get, Put, Snapshot

    async with EtcdClient(["10.0.0.1:2379", "10.0.0.2:2379"]) as etcd:
        await etcd.put("/stoker/deployments/chat", b"...")            # a lost answer raises Ambiguous
        kv = await etcd.get("/stoker/deployments/chat")               # KeyValue or None
        everything = await etcd.range("/stoker/deployments/")         # RangeResult(revision, kvs)

        # Renewed in the background; lost at etcd's word or at the local deadline, whichever is first.
        lease = await etcd.lease(ttl_s=10)
        await etcd.put("/stoker/nodes/n1", b"...", lease=lease.id)
        await lease.lost.wait()                                       # an asyncio.Event; see also alive()

        # One step, or none. Compare whatever may change: late copies of such a write fail by themselves.
        mine = await etcd.txn(
            [Compare.absent("/stoker/leaders/scaler")],
            then=[Put("/stoker/leaders/scaler", b"me", lease=lease.id)],
            otherwise=[Get("/stoker/leaders/scaler")],
        )
        if not mine.succeeded:
            holder = mine.responses[0].kvs[0]

        # Somebody else's lease, renewed once: returns the TTL, raises LeaseLost.
        await etcd.keep_alive_once(lease_id)

        async with etcd.watch_prefix("/stoker/nodes/") as watch:
            async for change in watch:
                if isinstance(change, Snapshot):                      # once, first
                    view = {kv.key: kv for kv in change.kvs}
                else:                                                 # Delta(revision, puts, deletes)
                    view |= {kv.key: kv for kv in change.puts}
                    for key in change.deletes:
                        view.pop(key, None)
                stale = watch.staleness() > 10                        # seconds; ask at any time

Keys are text, values bytes, times seconds of the event loop's monotonic clock. Every call has a deadline
(`call_timeout_s`, or `timeout=`), and raises an `EtcdError` with a stable reason when it passes.
"""

from stoker.etcd.client import EtcdClient, MemberStatus
from stoker.etcd.core.types import (
    Compare,
    Delete,
    Delta,
    Get,
    Is,
    KeyValue,
    Op,
    OpResult,
    Put,
    RangeResult,
    Snapshot,
    Target,
    TxnResult,
)
from stoker.etcd.errors import (
    Ambiguous,
    Compacted,
    EtcdDenied,
    EtcdError,
    EtcdFull,
    EtcdNoLeader,
    EtcdRejected,
    EtcdTooLarge,
    EtcdUnavailable,
    LeaseLost,
)
from stoker.etcd.lease import Lease
from stoker.etcd.transport import Tls
from stoker.etcd.watch import Watch, WatchTimes

__all__ = [
    "Ambiguous",
    "Compacted",
    "Compare",
    "Delete",
    "Delta",
    "EtcdClient",
    "EtcdDenied",
    "EtcdError",
    "EtcdFull",
    "EtcdNoLeader",
    "EtcdRejected",
    "EtcdTooLarge",
    "EtcdUnavailable",
    "Get",
    "Is",
    "KeyValue",
    "Lease",
    "LeaseLost",
    "MemberStatus",
    "Op",
    "OpResult",
    "Put",
    "RangeResult",
    "Snapshot",
    "Target",
    "Tls",
    "TxnResult",
    "Watch",
    "WatchTimes",
]
