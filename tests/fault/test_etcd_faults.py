"""The etcd layer while real servers are killed, frozen, compacted and replaced.

What must hold throughout: a watch delivers each revision once and in order, its view ends equal to the store,
and nothing that was acknowledged is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from stoker.etcd import (
    Ambiguous,
    Compare,
    Delta,
    EtcdClient,
    EtcdError,
    EtcdUnavailable,
    Get,
    Is,
    KeyValue,
    Lease,
    Put,
    Snapshot,
    Target,
    Watch,
    WatchTimes,
)
from tests.support.etcd import EtcdCluster, EtcdServer, lease_outlived
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault


class View:
    """A consumer: applies what a watch delivers, and checks that it is history."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.state: dict[str, KeyValue] = {}
        self.snapshots = 0
        self.deltas: list[Delta] = []
        self.worst_staleness = 0.0
        self.task = asyncio.create_task(self._consume())
        self._gauge = asyncio.create_task(self._measure())

    async def _consume(self) -> None:
        revision = 0
        async for change in self.watch:
            if isinstance(change, Snapshot):
                self.snapshots += 1
                self.state = {kv.key: kv for kv in change.kvs}
            else:
                assert change.revision > revision, "an old revision again"
                for key in change.deletes:
                    del self.state[key]  # a deletion of what was never there is a fault too
                self.state |= {kv.key: kv for kv in change.puts}
                self.deltas.append(change)
            revision = change.revision

    async def _measure(self) -> None:
        await eventually(lambda: self.snapshots)
        while True:
            self.worst_staleness = max(self.worst_staleness, self.watch.staleness())
            await asyncio.sleep(0.05)

    def values(self) -> dict[str, bytes]:
        return {key: kv.value for key, kv in self.state.items()}

    async def equals(self, client: EtcdClient, prefix: str, within_s: float = 60.0) -> None:
        """Wait until the view is the store's own content."""
        truth = {kv.key: kv for kv in (await client.range(prefix)).kvs}

        def same() -> bool:
            if self.task.done():
                self.task.result()
            return self.state == truth

        await eventually(same, "the view is the store", within_s)
        assert self.snapshots == 1, "never cleared and filled again"

    def versions(self, key: str) -> list[int]:
        return [kv.version for delta in self.deltas for kv in delta.puts if kv.key == key]

    async def close(self) -> None:
        self._gauge.cancel()
        await self.watch.close()
        await self.task


async def write(client: EtcdClient, key: str, stop: asyncio.Event, pauses: list[float]) -> int:
    """Count in `key` until stopped; returns the last count acknowledged and records the time between two.

    Each write compares: a copy of an earlier one, held up in a frozen member, must not undo later ones.
    """
    now = asyncio.get_running_loop().time
    count, last = 0, now()
    while not stop.is_set():
        with suppress(EtcdError):
            as_it_was = Compare(key, Target.VERSION, Is.EQUAL, count)
            result = await client.txn([as_it_was], [Put(key, b"%d" % (count + 1))], [Get(key)], timeout=2)
            # Where it was not as it was, a write of ours whose answer was lost had happened.
            count = count + 1 if result.succeeded else result.responses[0].kvs[0].version
            pauses.append(now() - last)
            last = now()
    return count


async def more(pauses: list[float], writes: int) -> None:
    """Wait until so many more writes were acknowledged."""
    target = len(pauses) + writes
    await eventually(lambda: len(pauses) >= target)


async def leader(cluster: EtcdCluster) -> EtcdServer:
    """The member that leads now."""
    for member in cluster.members:
        async with EtcdClient([member.endpoint]) as client:
            status = await client.status()
            if status.leader == status.member_id:
                return member
    raise AssertionError("no leader")


async def elapsed(waiting: Awaitable[object]) -> float:
    now = asyncio.get_running_loop().time
    started = now()
    await waiting
    return now() - started


async def test_kill_and_restart(etcd_alone: EtcdServer) -> None:
    async with EtcdClient([etcd_alone.endpoint]) as client:
        lease = await client.lease(ttl_s=5)
        await client.put("/k/leased", b"", lease=lease.id)
        view = View(client.watch_prefix("/k/"))
        stop, pauses = asyncio.Event(), list[float]()
        writer = asyncio.create_task(write(client, "/k/count", stop, pauses))
        for _ in range(2):
            await more(pauses, 50)
            etcd_alone.kill()
            etcd_alone.start(wait=False)
        await more(pauses, 50)
        stop.set()
        count = await writer
        await view.equals(client, "/k/")
        assert view.values()["/k/count"] == b"%d" % count
        seen = view.versions("/k/count")
        assert seen == list(range(seen[0], seen[0] + len(seen))), "each version once, none left out"
        assert max(pauses) < 5
        assert lease.alive()
        assert "/k/leased" in view.state
        await view.close()


async def test_a_frozen_server_is_noticed_and_taken_up_again(etcd_alone: EtcdServer) -> None:
    times = WatchTimes(progress_s=0.5, silence_s=1.5)
    async with EtcdClient([etcd_alone.endpoint], watch_times=times) as client:
        view = View(client.watch_prefix("/f/"))
        await client.put("/f/a", b"1")
        await view.equals(client, "/f/")
        etcd_alone.freeze()
        # Past the silence, so that the watch has been given up and is being tried again.
        assert await elapsed(eventually(lambda: view.watch.staleness() > 3)) < 8
        etcd_alone.thaw()
        await eventually(lambda: view.watch.staleness() < 1, within_s=60)
        await client.put("/f/a", b"2", idempotent=True, timeout=10)
        await view.equals(client, "/f/")
        assert view.versions("/f/a")[-1:] == [2]
        await view.close()


async def test_a_frozen_member_is_left_for_another_within_ten_seconds(etcd_cluster: EtcdCluster) -> None:
    async with EtcdClient(etcd_cluster.endpoints) as client, EtcdClient(etcd_cluster.endpoints) as other:
        view = View(client.watch_prefix("/m/"))
        await client.put("/m/a", b"1")
        await view.equals(client, "/m/")
        frozen = (await client.status()).endpoint
        etcd_cluster.at(frozen).freeze()
        # Only the watch itself notices: no other call is made through this client.
        while (await other.status()).endpoint == frozen:
            await other.get("/m/a")
        await other.put("/m/a", b"2", idempotent=True)
        await eventually(lambda: view.values()["/m/a"] == b"2", within_s=60)
        assert (await client.status()).endpoint != frozen
        await view.equals(other, "/m/")
        assert view.worst_staleness < 10
        await view.close()


async def test_compaction_under_a_watcher(etcd_cluster: EtcdCluster) -> None:
    cut_off, *rest = etcd_cluster.members
    async with (
        EtcdClient([cut_off.endpoint]) as client,
        EtcdClient([member.endpoint for member in rest]) as other,
    ):
        for key in ("kept", "kept before", "changed", "deleted", "reborn"):
            await other.put(f"/c/{key}", b"old")
        view = View(client.watch_prefix("/c/"))
        await view.equals(other, "/c/")
        # The difference must be against what deltas brought, too.
        await other.put("/c/came", b"and stays")
        await other.put("/c/came and goes", b"")
        await other.delete("/c/kept before")
        await view.equals(other, "/c/")
        cut_off.kill()
        await other.put("/c/changed", b"1", idempotent=True, timeout=10)
        await other.put("/c/changed", b"2")
        await other.delete("/c/deleted")
        await other.delete("/c/came and goes")
        await other.delete("/c/reborn")
        await other.put("/c/reborn", b"new")
        await other.put("/c/fleeting", b"")
        await other.delete("/c/fleeting")
        revision = await other.put("/c/added", b"new")
        await other.put("/elsewhere", b"so that the compaction passes all that the watcher missed")
        await other.compact(revision)
        cut_off.start(wait=False)
        await view.equals(other, "/c/")
        jump = view.deltas[-1]
        assert len(view.deltas) == 4
        assert sorted(kv.key for kv in jump.puts) == ["/c/added", "/c/changed", "/c/reborn"]
        assert jump.deletes == ("/c/came and goes", "/c/deleted")

        await other.put("/c/after", b"", idempotent=True)
        await view.equals(other, "/c/")
        assert len(view.deltas) == 5
        await view.close()


async def test_a_store_replaced_by_a_younger_one(etcd_alone: EtcdServer) -> None:
    """As after a restore from a backup: revisions went back, and prove nothing."""
    async with EtcdClient([etcd_alone.endpoint]) as client:
        for n in range(20):
            await client.put("/r/same", b"%d" % n)
        await client.put("/r/old", b"")
        async with client.watch_prefix("/r/") as watch:
            assert isinstance(await anext(watch), Snapshot)
            etcd_alone.wipe()
            etcd_alone.start()
            async with EtcdClient([etcd_alone.endpoint]) as fresh:
                revision = await fresh.put("/r/same", b"restored")
            seen: dict[str, bytes] = {}
            deleted: list[str] = []
            while seen.get("/r/same") != b"restored":  # the watch may be back before the put, or after
                change = await asyncio.wait_for(anext(watch), 10)
                assert isinstance(change, Delta)
                assert change.revision <= revision
                seen |= {kv.key: kv.value for kv in change.puts}
                deleted += change.deletes
            assert "/r/old" in deleted


@pytest.mark.parametrize("hurt", ["kill", "freeze"])
async def test_the_leader_is_lost_under_writers_and_watchers(etcd_cluster: EtcdCluster, hurt: str) -> None:
    async with (
        EtcdClient(etcd_cluster.endpoints) as client,
        EtcdClient(etcd_cluster.endpoints) as other,
    ):
        lease = await client.lease(ttl_s=3)
        await client.put("/l/leased", b"", lease=lease.id)
        views = [View(client.watch_prefix("/l/")), View(other.watch_prefix("/l/"))]
        stop = asyncio.Event()
        pauses: list[list[float]] = [[], [], []]
        writers = [
            asyncio.create_task(write(who, f"/l/{n}", stop, pauses[n]))
            for n, who in enumerate((client, other, client))
        ]
        await asyncio.gather(*(more(each, 30) for each in pauses))
        lost = await leader(etcd_cluster)
        lost.kill() if hurt == "kill" else lost.freeze()
        await asyncio.gather(*(more(each, 100) for each in pauses))
        lost.start(wait=False) if hurt == "kill" else lost.thaw()
        await lease_outlived(client, round(lease.ttl_s) + 1)
        stop.set()
        counts = await asyncio.gather(*writers)
        for view in views:
            await view.equals(client, "/l/")
            for n, count in enumerate(counts):
                assert view.values()[f"/l/{n}"] == b"%d" % count, "an acknowledged write is missing"
                seen = view.versions(f"/l/{n}")
                assert seen == list(range(seen[0], seen[0] + len(seen))), "each version once, none left out"
            assert view.worst_staleness < 10
            await view.close()
        assert max(max(each) for each in pauses) < 5, "writes resume within seconds"
        assert lease.alive()
        assert await other.get("/l/leased") is not None, "renewed since the leader died, or it would have ended"


async def test_quorum_lost_and_back(etcd_cluster: EtcdCluster) -> None:
    first, second, _ = etcd_cluster.members
    async with EtcdClient(etcd_cluster.endpoints) as client:
        view = View(client.watch_prefix("/q/"))
        await client.put("/q/a", b"1")
        await view.equals(client, "/q/")
        first.kill()
        second.kill()
        took = await elapsed(_fails(lambda: client.put("/q/a", b"2", idempotent=True, timeout=2)))
        assert took < 8
        await eventually(lambda: view.watch.staleness() > 4)
        assert view.values() == {"/q/a": b"1"}, "the last view stays"
        first.start(wait=False)
        second.start(wait=False)
        await eventually(lambda: view.watch.staleness() < 3)
        await client.put("/q/a", b"3", idempotent=True, timeout=10)
        await view.equals(client, "/q/")
        await view.close()


async def _fails(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(EtcdUnavailable):
        await call()


async def renewed(lease: Lease) -> None:
    """Wait until a lease of 2 s was renewed once more."""
    deadline = lease.deadline
    await eventually(lambda: lease.deadline > deadline, "it is renewed")


async def test_a_lease_is_lost_at_the_local_deadline_without_a_word_from_etcd(etcd_alone: EtcdServer) -> None:
    async with EtcdClient([etcd_alone.endpoint]) as client:
        for hurt, heal in ((etcd_alone.freeze, etcd_alone.thaw), (etcd_alone.kill, etcd_alone.start)):
            lease = await client.lease(ttl_s=2)
            await renewed(lease)
            assert lease.alive()
            left = lease.deadline - asyncio.get_running_loop().time()
            hurt()
            took = await elapsed(asyncio.wait_for(lease.lost.wait(), 30))
            assert left - 0.1 < took < left + 2
            assert not lease.alive()
            heal()
            await eventually(etcd_alone.healthy)


async def test_a_lost_answer_is_ambiguous_and_a_refused_connection_is_not(etcd_alone: EtcdServer) -> None:
    async with EtcdClient([etcd_alone.endpoint]) as client:
        etcd_alone.freeze()
        with pytest.raises(Ambiguous) as caught:
            await client.txn([Compare.absent("/a/k")], [Put("/a/k", b"")], timeout=0.5)
        assert caught.value.reason == "ETCD_AMBIGUOUS"
        etcd_alone.thaw()
        await client.put("/a/k", b"", idempotent=True, timeout=10)
        etcd_alone.kill()
        with suppress(EtcdUnavailable):
            await client.get("/a/k", timeout=1)
        with pytest.raises(EtcdUnavailable):
            await client.txn([Compare.absent("/a/k")], [Put("/a/k", b"")], timeout=1)
        # A transaction that was never sent is tried again until the server is back.
        txn = asyncio.create_task(client.txn([Compare.exists("/a/k")], [Put("/a/k", b"2")], timeout=10))
        etcd_alone.start(wait=False)
        assert (await txn).succeeded
