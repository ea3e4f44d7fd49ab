"""Following KV events through gaps, late starts, restarts and noise, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq

from stoker.common.errors import Unavailable
from stoker.node_agent.engine.events import Batch, Malformed, Stored
from stoker.node_agent.engine.protocol import KvEndpoint
from stoker.node_agent.engine.stream import Item, KvEventStream, Lost, Received, Restarted
from stoker.sim_engine.config import KvEventsConfig
from stoker.sim_engine.core.blocks import BlocksStored
from stoker.sim_engine.publisher import Publisher
from tests.support.etcd import free_port
from tests.support.waiting import eventually

QUIET_S = (0.02, 0.05)


@pytest.fixture
def endpoint() -> KvEndpoint:
    return KvEndpoint(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")


class Source:
    """An engine's event side, whose batch number n stores block n; `drop_every` makes gaps on the live socket."""

    def __init__(self, endpoint: KvEndpoint, *, buffer: int = 1000, drop_every: int = 0) -> None:
        config = KvEventsConfig(endpoint.events, endpoint.replay, buffer, topic="", hwm=1000)
        self.publisher = Publisher(config, block_size=1, drop_every=drop_every)
        self._serving = asyncio.create_task(self.publisher.serve_replay())
        self._clock = 0.0

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self._clock += 1
            self.publisher.publish(self._clock, [BlocksStored((number,), None, (number,), None)])

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self.publisher.close()


def said(item: Item) -> object:
    """A batch as the number of the block it stores; other items as they are."""
    if isinstance(item, Received) and isinstance(item.batch, Batch):
        (event,) = item.batch.events
        assert isinstance(event, Stored)
        return event.hashes[0]
    return item


async def take(items: AsyncIterator[Item], count: int) -> list[object]:
    async with asyncio.timeout(10):
        return [said(await anext(items)) for _ in range(count)]


async def test_a_late_follower_gets_all_that_is_kept_then_what_comes(endpoint: KvEndpoint) -> None:
    source = Source(endpoint)
    source.send(0, 1, 2)
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        assert await take(items, 3) == [0, 1, 2]
        source.send(3, 4)
        assert await take(items, 2) == [3, 4]
        assert stream.counts.lost == 0
    await source.close()


async def test_a_gap_is_filled_in_order(endpoint: KvEndpoint) -> None:
    source = Source(endpoint, drop_every=3)
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        source.send(*range(12))
        assert await take(items, 12) == list(range(12))
        assert stream.counts.replayed > 0
        assert stream.counts.lost == 0
    await source.close()


async def test_the_last_batch_is_not_missed_when_nothing_follows(endpoint: KvEndpoint) -> None:
    source = Source(endpoint, drop_every=4)
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        source.send(0, 1, 2, 3)  # 3 is never sent live
        assert await take(items, 4) == [0, 1, 2, 3]
    await source.close()


async def test_what_the_buffer_no_longer_holds_is_said_to_be_lost(endpoint: KvEndpoint) -> None:
    source = Source(endpoint, buffer=2)
    source.send(*range(10))
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        assert await take(items, 3) == [Lost(0, 7), 8, 9]
        assert stream.counts.lost == 8
    await source.close()


async def test_a_gap_without_replay_is_lost_and_the_rest_goes_on(endpoint: KvEndpoint) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.rcvtimeo = 10_000
        publisher.connect(endpoint.events)
        # The replay port is dead: nothing binds it.
        async with KvEventStream(endpoint, replay_timeout_s=0.05, quiet_s=QUIET_S) as stream:
            items = aiter(stream)
            first = asyncio.ensure_future(anext(items))
            source = _payloads(3)
            await asyncio.to_thread(publisher.recv)  # the subscription: what is sent from here on arrives
            publisher.send_multipart([b"", (0).to_bytes(8, "big"), source[0]])
            assert said(await first) == 0
            publisher.send_multipart([b"", (2).to_bytes(8, "big"), source[2]])
            assert await take(items, 2) == [Lost(1, 1), 2]


@pytest.mark.parametrize("count", [2, 3, 5], ids=["shorter", "as long", "longer"])
async def test_another_engine_on_the_same_ports_is_a_new_beginning(endpoint: KvEndpoint, count: int) -> None:
    """However much the new engine has said before its connection is up, and so to nobody."""
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        first = Source(endpoint)
        first.send(0, 1, 2)
        assert await take(items, 3) == [0, 1, 2]
        await first.close()
        second = Source(endpoint)
        second.send(*range(100, 100 + count))
        assert await take(items, 1 + count) == [Restarted(), *range(100, 100 + count)]
        assert stream.counts.restarts == 1
        second.send(200)
        assert await take(items, 1) == [200]
        await second.close()


async def test_following_from_a_known_place_replays_only_what_came_after(endpoint: KvEndpoint) -> None:
    source = Source(endpoint)
    source.send(*range(5))
    async with KvEventStream(endpoint, start=3, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        assert await take(items, 2) == [3, 4]
        source.send(5)
        assert await take(items, 1) == [5]
        assert stream.counts.restarts == 0
    await source.close()


async def test_an_engine_that_never_was_at_the_known_place_is_another(endpoint: KvEndpoint) -> None:
    source = Source(endpoint)
    source.send(0, 1)
    async with KvEventStream(endpoint, start=3, quiet_s=QUIET_S) as stream:
        assert await take(aiter(stream), 3) == [Restarted(), 0, 1]
    await source.close()


async def test_noise_costs_itself_only(endpoint: KvEndpoint) -> None:
    source = Source(endpoint)
    async with KvEventStream(endpoint, quiet_s=QUIET_S) as stream:
        items = aiter(stream)
        source.send(0)
        assert await take(items, 1) == [0]
        with zmq.Context() as context, context.socket(zmq.XPUB) as noise:
            noise.rcvtimeo = 10_000
            noise.connect(endpoint.events)
            waiting = asyncio.ensure_future(anext(items))
            await asyncio.to_thread(noise.recv)  # the subscription: what is sent from here on arrives
            noise.send_multipart([b"only one frame"])
            noise.send_multipart([b"", b"short", b"payload"])
            await eventually(lambda: stream.counts.malformed == 2, "both are counted")
            source.publisher._buffer.append((1, b"\xc1"))
            source.publisher._next = 2
            async with asyncio.timeout(10):
                item = await waiting
        assert isinstance(item, Received)
        assert item.seq == 1
        assert isinstance(item.batch, Malformed)
        source.send(2)
        assert await take(items, 1) == [2]
    await source.close()


async def test_a_taken_port_is_refused_with_what_to_do(endpoint: KvEndpoint) -> None:
    async with KvEventStream(endpoint):
        with pytest.raises(Unavailable, match="another port"):
            async with KvEventStream(endpoint):
                pass


def _payloads(count: int) -> list[bytes]:
    """The payloads of batches 0 to `count` - 1, as a publisher packs them."""
    config = KvEventsConfig("inproc://nowhere", None, count, topic="", hwm=10)
    publisher = Publisher(config, block_size=1)
    for number in range(count):
        publisher.publish(float(number + 1), [BlocksStored((number,), None, (number,), None)])
    payloads = [payload for _, payload in publisher._buffer]
    publisher.close()
    return payloads
