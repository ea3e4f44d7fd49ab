"""The watch against a real etcd, while nothing fails but history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stoker.etcd import Delete, Delta, EtcdClient, Put, RangeResult, Snapshot, Watch, WatchTimes
from stoker.etcd.core import watch as core_watch
from stoker.etcd.core.watch import Event
from tests.support.etcd import EtcdServer
from tests.support.waiting import eventually


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.endpoint]) as client:
        yield client


async def snapshot(watch: Watch) -> Snapshot:
    item = await asyncio.wait_for(anext(watch), 60)
    assert isinstance(item, Snapshot)
    return item


async def delta(watch: Watch) -> Delta:
    item = await asyncio.wait_for(anext(watch), 60)
    assert isinstance(item, Delta)
    return item


async def test_snapshot_then_one_delta_for_each_revision(client: EtcdClient) -> None:
    await client.put("/w1/a", b"1")
    async with client.watch_prefix("/w1/") as watch:
        assert [kv.value for kv in (await snapshot(watch)).kvs] == [b"1"]
        await client.put("/w1x", b"not ours")
        revision = await client.put("/w1/b", b"2")
        change = await delta(watch)
        assert change.revision == revision
        assert [(kv.key, kv.value) for kv in change.puts] == [("/w1/b", b"2")]
        both = await client.txn(then=[Put("/w1/c", b"3"), Delete("/w1/a")])
        change = await delta(watch)
        assert change.revision == both.revision == watch.revision
        assert ([kv.key for kv in change.puts], change.deletes) == (["/w1/c"], ("/w1/a",))


async def test_waiting_may_be_cancelled_without_losing_anything(client: EtcdClient) -> None:
    async with client.watch_prefix("/w2/") as watch:
        await snapshot(watch)
        writes = asyncio.gather(*(client.put("/w2/k", b"") for _ in range(200)))
        seen: list[int] = []
        cancelled = 0
        while len(seen) < 200:
            try:
                item = await asyncio.wait_for(anext(watch), 0.0005)
            except TimeoutError:
                cancelled += 1
            else:
                seen += [kv.version for kv in item.puts] if isinstance(item, Delta) else []
        await writes
    assert seen == list(range(1, 201))
    assert cancelled


async def test_fragments_are_put_together_by_revision(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    fragments = 0
    complete = core_watch.complete

    def counting(held: list[Event], events: list[Event], *, more: bool) -> tuple[list[Event], list[Event]]:
        nonlocal fragments
        fragments += more
        return complete(held, events, more=more)

    monkeypatch.setattr(core_watch, "complete", counting)
    before = await client.range("/w3/")
    revisions = []
    for n in range(20):
        ops = [Put(f"/w3/{i}", bytes([n]) * 270_000) for i in range(5)]
        revisions.append((await client.txn(then=ops)).revision)

    async def read_long_ago(_: str) -> RangeResult:
        return before

    # It starts 27 MB behind: one batch, which etcd cuts at some 2 MB, inside transactions of 1.35 MB.
    watch = Watch(client._transport, read_long_ago, "/w3/", WatchTimes())
    async with watch:
        await snapshot(watch)
        changes = [await delta(watch) for _ in revisions]
    assert [change.revision for change in changes] == revisions
    for n, change in enumerate(changes):
        assert [(kv.key, kv.value[:1]) for kv in change.puts] == [(f"/w3/{i}", bytes([n])) for i in range(5)]
    assert fragments, "etcd sent nothing in fragments: the test shows nothing"
    await client.delete("/w3/", prefix=True)


async def test_a_slow_consumer_holds_the_watch_back_and_loses_nothing(client: EtcdClient) -> None:
    async with client.watch_prefix("/w4/") as watch:
        await snapshot(watch)
        for n in range(0, 1_500, 100):
            await asyncio.gather(*(client.put("/w4/k", b"%d" % i) for i in range(n, n + 100)))
        last = (await client.range("/w4/")).kvs[0]
        seen = [(await delta(watch)).puts[0] for _ in range(1_500)]
    assert [kv.version for kv in seen] == list(range(1, 1_501))
    assert seen[-1] == last


async def test_two_watches_and_the_empty_prefix(client: EtcdClient) -> None:
    async with client.watch_prefix("/w5/") as one, client.watch_prefix("") as everything:
        await snapshot(one)
        await snapshot(everything)
        revision = await client.put("/w5/k", b"")
        assert (await delta(one)).revision == (await delta(everything)).revision == revision


async def test_staleness_is_infinite_before_the_snapshot_and_small_after(client: EtcdClient) -> None:
    async with client.watch_prefix("/w6/") as watch:
        assert watch.staleness() == float("inf")
        await snapshot(watch)
        for _ in range(2):
            await eventually(lambda: watch.staleness() > 0.4, "it grows while nobody answers")
            # What only an answer can do; one is asked for every 2 s.
            await eventually(lambda: watch.staleness() < 0.4, "it falls")
        assert watch.staleness(now=asyncio.get_running_loop().time() + 60) > 59


async def test_closing_ends_the_iteration(client: EtcdClient) -> None:
    watch = client.watch_prefix("/w7/")
    await snapshot(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await watch.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(watch), 60)
