"""Demand and load as routers and agents tell them, made up: a steady stream of requests for one model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.client import DispatchAnnouncer
from tests.support.deciders import ObedientAgent


class DemandingRouter:
    """A router without requests: what it counts grows with the clock. Use it as an async context manager."""

    def __init__(self, endpoints: list[str], router_id: str, model: str, *deployments: str) -> None:
        self.per_s = 0.0
        self.queued = 0
        self._model = model
        self._deployments = deployments or (model,)
        self._counted, self._at = 0.0, 0.0
        self._announcer = DispatchAnnouncer(endpoints, router_id, demand=self._demand, rng=random.Random(1))

    def _demand(self, whole: bool) -> Iterable[registry_pb2.Demand]:
        now = asyncio.get_running_loop().time()
        self._counted += self.per_s * (now - self._at) if self._at else 0.0
        self._at = now
        arrivals = int(self._counted)
        yield registry_pb2.Demand(
            model=self._model,
            deployments=self._deployments,
            arrivals=arrivals,
            prompt_tokens=100 * arrivals,
            queued=self.queued,
            oldest_queued_s=1.0 if self.queued else 0.0,
            held=self.queued,
        )

    async def __aenter__(self) -> DemandingRouter:
        await self._announcer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._announcer.close()


class LoadedAgent(ObedientAgent):
    """Runs what it is assigned, ready at once; tells twice a second that each replica has `running` requests."""

    running = 0
    silent = False
    _telling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoadedAgent:
        await super().__aenter__()
        self._telling = asyncio.create_task(self._tell())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await super().__aexit__()

    async def _tell(self) -> None:
        sequence = 0
        while True:
            sequence += 1
            for each in self.assignments.assignments if self.assignments is not None else ():
                if not self.silent:
                    load = registry_pb2.ReplicaLoad(
                        replica_id=each.replica_id,
                        epoch=1,
                        sequence=sequence,
                        running=self.running,
                        waiting=0,
                        generation_tokens=sequence * self.running,
                    )
                    self.session.publish_load([load])
            await asyncio.sleep(0.5)  # reports come by the clock
