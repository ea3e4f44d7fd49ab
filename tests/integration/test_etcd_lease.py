"""Leases against a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stoker.etcd import EtcdClient, LeaseLost
from tests.support.etcd import EtcdServer, lease_gone, lease_outlived


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    async with EtcdClient([etcd.endpoint]) as client:
        yield client


async def test_a_held_lease_outlives_its_ttl(client: EtcdClient) -> None:
    async with await client.lease(ttl_s=1) as lease:
        await client.put("/lease/held", b"", lease=lease.id)
        first = lease.deadline
        await lease_outlived(client, 2)
        assert lease.alive()
        assert lease.deadline > first + 1
        assert await client.get("/lease/held") is not None
    assert await client.get("/lease/held") is None, "leaving the block revokes the lease"


async def test_without_renewal_a_lease_expires(client: EtcdClient) -> None:
    lease_id = await client.grant(1)
    assert await client.time_to_live(lease_id) is not None
    await lease_gone(client, lease_id)
    with pytest.raises(LeaseLost) as caught:
        await client.keep_alive_once(lease_id)
    assert caught.value.reason == "ETCD_LEASE_LOST"


async def test_a_revoked_lease_is_lost_at_the_next_renewal(client: EtcdClient, etcd: EtcdServer) -> None:
    lease = await client.lease(ttl_s=2)
    async with EtcdClient([etcd.endpoint]) as other:
        await other.revoke(lease.id)
        await other.revoke(lease.id)
    started = asyncio.get_running_loop().time()
    await asyncio.wait_for(lease.lost.wait(), 60)
    assert asyncio.get_running_loop().time() - started < 1.8, "a third of the TTL, not all of it"
    assert not lease.alive()
    assert "revoked" in lease.lost_because


async def test_a_lease_granted_elsewhere_can_be_renewed_and_adopted(client: EtcdClient, etcd: EtcdServer) -> None:
    async with EtcdClient([etcd.endpoint]) as other:
        lease_id = await other.grant(2)
    assert await client.keep_alive_once(lease_id) == 2
    lease = await client.adopt(lease_id)
    await lease_outlived(client, 3)
    assert lease.alive()
    await lease.revoke()
    with pytest.raises(LeaseLost):
        await client.adopt(lease_id)


async def test_a_thousand_leases_are_renewed_on_one_stream(client: EtcdClient) -> None:
    leases = await asyncio.gather(*(client.grant(30) for _ in range(1_000)))
    gone = leases[::100]
    await asyncio.gather(*(client.revoke(lease_id) for lease_id in gone))
    started = asyncio.get_running_loop().time()
    results = await asyncio.gather(*(client.keep_alive_once(lease_id) for lease_id in leases), return_exceptions=True)
    assert asyncio.get_running_loop().time() - started < 30
    lost = [lease for lease, result in zip(leases, results, strict=True) if isinstance(result, LeaseLost)]
    assert lost == gone
    assert [r for r in results if not isinstance(r, LeaseLost)] == [30.0] * 990
    await asyncio.gather(*(client.revoke(lease_id) for lease_id in leases))


async def test_a_cancelled_renewal_leaves_the_others_alone(client: EtcdClient) -> None:
    lease_id = await client.grant(5)
    renewals = [asyncio.ensure_future(client.keep_alive_once(lease_id)) for _ in range(10)]
    await asyncio.sleep(0)
    for renewal in renewals[::2]:
        renewal.cancel()
    results = await asyncio.wait_for(asyncio.gather(*renewals, return_exceptions=True), 5)
    assert results[1::2] == [5.0] * 5


async def test_a_paused_client_knows_that_its_lease_is_lost(client: EtcdClient) -> None:
    """As after SIGSTOP of the client: the loop does not run for longer than the TTL."""
    lease = await client.lease(ttl_s=1)
    while asyncio.get_running_loop().time() < lease.deadline:
        pass  # blocking the loop is the point
    assert not lease.alive(), "known before the background task has run"
    await asyncio.wait_for(lease.lost.wait(), 30)
    assert "no renewal was answered" in lease.lost_because
