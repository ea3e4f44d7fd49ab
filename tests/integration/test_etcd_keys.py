"""Keys, transactions and errors against a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker.etcd import (
    Ambiguous,
    Compacted,
    Compare,
    Delete,
    EtcdClient,
    EtcdRejected,
    EtcdTooLarge,
    EtcdUnavailable,
    Get,
    Is,
    LeaseLost,
    Put,
    Target,
    Tls,
)
from tests.support.etcd import EtcdServer, free_port
from tests.support.waiting import eventually


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.endpoint]) as client:
        yield client


async def test_put_get_delete(client: EtcdClient) -> None:
    assert await client.get("/keys/a") is None
    first = await client.put("/keys/a", b"1")
    second = await client.put("/keys/a", b"2")
    kv = await client.get("/keys/a")
    assert kv is not None
    assert (kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease) == (b"2", first, second, 2, 0)
    old = await client.get("/keys/a", revision=first)
    assert old is not None
    assert old.value == b"1"
    assert await client.delete("/keys/a") == 1
    assert await client.delete("/keys/a") == 0
    assert await client.get("/keys/a") is None


async def test_keys_that_are_not_utf8_survive(client: EtcdClient) -> None:
    key = b"/odd/\xff\xfe".decode("utf-8", "surrogateescape")
    await client.put(key, b"\x00\xff")
    (kv,) = (await client.range("/odd/")).kvs
    assert (kv.key, kv.value) == (key, b"\x00\xff")
    assert await client.delete(key) == 1


async def test_range_reads_many_pages_of_one_revision(client: EtcdClient) -> None:
    names = [f"/pages/{i:05}" for i in range(1_300)]
    for start in range(0, len(names), 100):
        await client.txn(then=[Put(name, name.encode()) for name in names[start : start + 100]])
    await client.put("/pagesX", b"a neighbour, not under the prefix")

    reading = asyncio.create_task(client.range("/pages/"))
    writes = [asyncio.create_task(client.put(names[-1], b"later")) for _ in range(20)]
    result = await reading
    await asyncio.gather(*writes)

    assert [kv.key for kv in result.kvs] == names
    assert max(kv.mod_revision for kv in result.kvs) <= result.revision
    again = await client.range("/pages/", revision=result.revision)
    assert again.kvs == result.kvs


async def test_large_values_are_read_in_smaller_pages(client: EtcdClient) -> None:
    for n in range(35):
        await client.put(f"/large/{n:02}", b"x" * 1_000_000)
    result = await client.range("/large/")
    assert [kv.key for kv in result.kvs] == [f"/large/{n:02}" for n in range(35)]
    # One step cannot be cut up, and by the time its answer proves too large it has happened.
    with pytest.raises(Ambiguous, match="larger than max"):
        await client.txn(then=[Get("/large/", prefix=True), Put("/large/after", b"")])
    assert await client.get("/large/after") is not None
    assert await client.delete("/large/", prefix=True) == 36


async def test_txn_takes_one_branch_and_answers_each_operation(client: EtcdClient) -> None:
    made = await client.txn([Compare.absent("/txn/leader")], [Put("/txn/leader", b"me")], [Get("/txn/leader")])
    assert made.succeeded
    late = await client.txn([Compare.absent("/txn/leader")], [Put("/txn/leader", b"you")], [Get("/txn/leader")])
    assert not late.succeeded
    (holder,) = late.responses[0].kvs
    assert holder.value == b"me"

    fence = Compare.created_at("/txn/leader", holder.create_revision)
    fenced = await client.txn([fence], [Put("/txn/a", b"1"), Put("/txn/b", b"2"), Get("/txn/", prefix=True)])
    assert fenced.succeeded
    assert len(fenced.responses[2].kvs) == 3
    gone = await client.txn([fence], [Delete("/txn/", prefix=True)])
    assert gone.responses[0].deleted == 3
    assert not (await client.txn([fence], [Put("/txn/a", b"1")])).succeeded


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare("/cmp/k", Target.VERSION, Is.EQUAL, 2), True),
        (Compare("/cmp/k", Target.VERSION, Is.LESS, 2), False),
        (Compare("/cmp/k", Target.VALUE, Is.EQUAL, b"v2"), True),
        (Compare("/cmp/k", Target.VALUE, Is.NOT_EQUAL, b"v2"), False),
        (Compare("/cmp/k", Target.LEASE, Is.EQUAL, 0), True),
        (Compare("/cmp/k", Target.MOD_REVISION, Is.GREATER, 1), True),
        (Compare("/cmp/k", Target.CREATE_REVISION, Is.EQUAL, 1), False),
        (Compare.exists("/cmp/k"), True),
        (Compare.exists("/cmp/none"), False),
        (Compare.absent("/cmp/none"), True),
    ],
    ids=str,
)
async def test_every_comparison(client: EtcdClient, compare: Compare, holds: bool) -> None:
    await client.delete("/cmp/k")
    await client.put("/cmp/k", b"v1")
    await client.put("/cmp/k", b"v2")
    assert (await client.txn([compare])).succeeded is holds


async def test_unchanged_is_a_compare_and_swap(client: EtcdClient) -> None:
    await client.put("/cas/n", b"0")

    async def increment() -> None:
        while True:
            kv = await client.get("/cas/n")
            assert kv is not None
            swapped = await client.txn([Compare.unchanged(kv)], [Put("/cas/n", b"%d" % (int(kv.value) + 1))])
            if swapped.succeeded:
                return

    await asyncio.gather(*(increment() for _ in range(10)))
    kv = await client.get("/cas/n")
    assert kv is not None
    assert kv.value == b"10"


async def test_a_compacted_revision_says_so(client: EtcdClient) -> None:
    old = await client.put("/compact/k", b"1")
    await client.compact(await client.put("/compact/k", b"2"))
    await client.compact(old)  # again, and older: nothing to do
    with pytest.raises(Compacted) as caught:
        await client.get("/compact/k", revision=old)
    assert caught.value.reason == "ETCD_COMPACTED"


async def test_wrong_requests_are_rejected_at_once(client: EtcdClient) -> None:
    with pytest.raises(EtcdRejected, match="too many operations"):
        await client.txn(then=[Put(f"/many/{i}", b"") for i in range(200)])
    with pytest.raises(EtcdTooLarge, match="too large"):
        await client.put("/large", b"x" * 2_000_000)
    with pytest.raises(LeaseLost):
        await client.put("/leased", b"x", lease=12345)
    with pytest.raises(EtcdRejected, match="list is empty"):
        EtcdClient([])
    with pytest.raises(TypeError, match="VALUE takes bytes"):
        Compare("/k", Target.VALUE, Is.EQUAL, 1)


async def test_nobody_there_is_unavailable_in_time() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(EtcdUnavailable, match=r"no endpoint answered within 0\.5 s") as caught:
        await EtcdClient([f"127.0.0.1:{free_port()}"], call_timeout_s=0.5).connect()
    assert asyncio.get_running_loop().time() - started < 1.5
    assert caught.value.retry_after_s


async def test_a_dead_endpoint_in_the_list_does_not_matter(etcd: EtcdServer) -> None:
    for _ in range(6):  # the first endpoint is drawn: some of these begin at the dead one
        async with EtcdClient([f"127.0.0.1:{free_port()}", etcd.endpoint]) as client:
            assert (await client.status()).endpoint == etcd.endpoint


async def test_tls(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path, extra=["--auto-tls"])
    server.scheme = "https"
    server.start(wait=False)
    certificate = server.data / "fixtures" / "client" / "cert.pem"
    try:
        await eventually(lambda: certificate.exists() and certificate.read_bytes().endswith(b"-----\n"))
        async with EtcdClient([server.endpoint], tls=Tls.from_files(certificate), call_timeout_s=10) as client:
            await client.put("/tls", b"1")
            async with client.watch_prefix("/tls") as watch:
                assert (await anext(watch)).revision >= 2
        with pytest.raises(EtcdUnavailable):
            await EtcdClient([server.endpoint], call_timeout_s=0.5).connect()
    finally:
        server.kill()
