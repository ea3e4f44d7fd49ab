"""The parity probe's tasks follow the fleet."""

from __future__ import annotations

import asyncio
import random
from typing import cast

from stoker.api.registry.v1 import registry_pb2
from stoker.router import core
from stoker.router.parity import ParityProbe
from stoker.router.tokenizer_store import TokenizerStore
from stoker.router.upstream import Engines
from stoker.router.view import View
from tests.support.router import replica


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
