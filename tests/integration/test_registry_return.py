"""Agents go back to the registry of their own once it serves again, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stoker.etcd import EtcdClient
from stoker.registry.client import Connected, RegistryClient, ReportSession
from stoker.registry.core import keys
from tests.support.etcd import EtcdServer
from tests.support.registry import Agent, RegistryUnderTest, Watcher, assignment, node, two_registries
from tests.support.waiting import eventually


@pytest.fixture
async def pair(etcd: EtcdServer) -> AsyncIterator[tuple[RegistryUnderTest, RegistryUnderTest]]:
    async with EtcdClient([etcd.endpoint]) as client:
        await client.delete(keys.PREFIX, prefix=True)
    async with two_registries(etcd.endpoint) as pair:
        yield pair


def hurried(endpoints: list[str]) -> Agent:
    """An agent that looks for its own registry after a tenth of a second."""
    agent = Agent(endpoints, node("n1"))
    agent.session = ReportSession(endpoints, node("n1"), return_s=0.1)
    return agent


def where(agent: Agent) -> list[str]:
    return [event.endpoint for event in agent.events if isinstance(event, Connected)]


async def test_an_agent_returns_with_all_it_has(pair: tuple[RegistryUnderTest, RegistryUnderTest]) -> None:
    endpoints = [each.endpoint for each in pair]
    agent = hurried(endpoints)
    own = next(each for each in pair if each.endpoint == agent.session._endpoints[0])
    other = next(each for each in pair if each is not own)
    async with Watcher(endpoints) as watcher, RegistryClient(endpoints) as client, agent:
        fence = (await client.acquire_leadership("planner", "p", 30.0)).fence
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(watcher.ready("chat-0"))
        agent.store("chat-0", 1)
        agent.load("chat-0", 1, 1)
        await eventually(lambda: watcher.blocks.get("chat-0") == {1} and "chat-0" in watcher.loads)
        lease_id = agent.session.lease_id
        await own.stop()
        await eventually(lambda: where(agent) == [own.endpoint, other.endpoint])
        agent.store("chat-0", 2)
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2})
        await own.start()
        await eventually(lambda: where(agent) == [own.endpoint, other.endpoint, own.endpoint])
        agent.store("chat-0", 3)
        agent.load("chat-0", 2, 2)
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2, 3})
        await eventually(lambda: watcher.loads["chat-0"].sequence == 2)
        assert own.registry is not None
        assert own.registry.hub.freshness().nodes == ["n1"]
        assert agent.session.lease_id == lease_id
        assert watcher.removed() == set()
        assert len(watcher.states("chat-0")) == len(set(watcher.states("chat-0"))), "no state was told twice"


async def test_an_agent_stays_where_it_is_while_its_own_registry_is_away(
    pair: tuple[RegistryUnderTest, RegistryUnderTest],
) -> None:
    endpoints = [each.endpoint for each in pair]
    agent = hurried(endpoints)
    own = next(each for each in pair if each.endpoint == agent.session._endpoints[0])
    async with agent:
        await eventually(lambda: len(where(agent)) == 1)
        await own.stop()
        await eventually(lambda: len(where(agent)) == 2)
        with pytest.raises(TimeoutError):  # it looks, some times, and finds nothing
            await asyncio.wait_for(agent.session._until_home_serves(), 1.0)
        assert len(where(agent)) == 2
        assert agent.session.connected.is_set()
