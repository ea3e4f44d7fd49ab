"""The parity probe's tasks follow the fleet."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.router import core
from stoker.router.fleet.pools import OK, Target
from stoker.router.fleet.view import View
from stoker.router.http.engines import Engines
from stoker.router.probes.parity import ParityProbe
from stoker.router.prompts.tokenizer_store import TokenizerStore
from tests.support.router import replica


class Proving(ParityProbe):
    """Every replica is found alike at once."""

    async def _probe(self, target: Target) -> str | None:
        return OK


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([records_pb2.Replica(replica_id="tiny-0", epoch=1)], id="told-without-its-engine"),
        pytest.param([], id="gone"),
    ],
)
async def test_a_replica_told_anew_in_the_same_life_is_proved_anew(
    between: list[records_pb2.Replica],
) -> None:
    view = View(core.RoutingConfig(), core.HealthConfig())
    tokenizers = TokenizerStore(lambda _: None, "", random.Random(0))  # type: ignore[arg-type, return-value]
    probe = Proving(view, cast(Engines, None), tokenizers, random.Random(0))
    ready = replica("tiny-0", "http://a")
    try:
        for replicas in ([ready], between, [ready]):
            view.records(registry_pb2.Records(replicas=replicas), now=0.0, snapshot=True, whole=True)
            if replicas:
                probe.sync()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert view.targets["tiny-0"].parity == OK
    finally:
        await probe.close()


async def test_a_replica_that_left_is_probed_no_more() -> None:
    view = View(core.RoutingConfig(), core.HealthConfig())
    tokenizers = TokenizerStore(lambda _: None, "", random.Random(0))  # type: ignore[arg-type, return-value]
    probe = ParityProbe(view, cast(Engines, None), tokenizers, random.Random(0))
    before = asyncio.all_tasks()
    try:
        for number in range(3):
            name = f"tiny-{number}"
            view.records(registry_pb2.Records(replicas=[replica(name, "http://a")]), now=0.0, snapshot=True)
            probe.sync()
            assert len(asyncio.all_tasks() - before) == 1, "it waits for a tokenizer"
            view.records(None, registry_pb2.Removals(replicas=[name]), now=1.0)
            probe.sync()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before
    finally:
        await probe.close()
