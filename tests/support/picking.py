"""A router's picking side without network, under a clock of the test's own."""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from stoker.api.registry.v1 import registry_pb2
from stoker.common.ticket_keys import KeyFile
from stoker.router.config import QueueConfig, TenantsConfig
from stoker.router.core import HealthConfig, RoutingConfig
from stoker.router.fleet.view import View
from stoker.router.flights.routing import Router
from stoker.router.flights.tenants import NOBODY, Caller
from stoker.router.picking.picker import Picked, Picker
from stoker.router.picking.picks import Picks
from stoker.router.picking.signing import Signer
from stoker.router.prompts.plan import Planner
from stoker.router.prompts.prompt import COMPLETIONS, Asked, Prompt, tokenized
from stoker.router.workers.siblings import Siblings
from tests.support.router import replica

UNHEARD_S, SILENCE_S, LONGEST_S = 12.0, 15.0, 60.0


def packed(tokens: int, first: int = 0) -> bytes:
    """Token ids as little-endian u32."""
    return array("I", range(first, first + tokens)).tobytes()


class World:
    """Replicas tiny-0 …, and who picks among them."""

    def __init__(self, replicas: int = 3, keys: Path | None = None, **router: Any) -> None:
        self.now = 100.0
        self.wall = 1_000_000.0
        self.view = View(RoutingConfig(), HealthConfig())
        threads = ThreadPoolExecutor(1)
        planner = Planner(cast(Any, SimpleNamespace(get=lambda sha: None)), threads, 8192)
        self.router = Router(
            self.view,
            planner,
            policy="stoker",
            allow_policy=True,
            retries=2,
            max_in_flight=router.pop("max_in_flight", 64),
            queue=router.pop("queue", QueueConfig()),
            tenants=router.pop("tenants", TenantsConfig()),
            rng=random.Random(1),
            clock=router.pop("clock", lambda: self.now),
        )
        self.picks = Picks(self.router, UNHEARD_S, SILENCE_S, LONGEST_S, Siblings.alone())
        signer = Signer(KeyFile(str(keys) if keys else ""), 10.0, lambda: self.wall)
        self.signer = signer
        self.picker = Picker(self.router, self.picks, signer, 2, Siblings.alone())
        records = [replica(f"tiny-{n}", f"http://engine-{n}", agent=f"node-{n}:7330") for n in range(replicas)]
        self.view.records(
            registry_pb2.Records(replicas=records), registry_pb2.Removals(), now=self.now, snapshot=True
        )

    @property
    def fleet(self) -> Any:
        return self.view.pools["tiny"].fleet

    async def pick(self, tokens: int = 640, caller: Caller = NOBODY, first: int = 0, **how: Any) -> Picked:
        prompt = Prompt(b"", tokenized=tokenized(packed(tokens, first)), max_output_tokens=16)
        picked = self.picker.pick(Asked(COMPLETIONS, "tiny", prompt, True), caller, "id", **how)
        return picked if isinstance(picked, Picked) else await picked

    def idle(self) -> bool:
        """Nothing is held."""
        held = [target.in_flight for target in self.view.targets.values()]
        return (self.router.in_flight, self.fleet.load.in_flight, len(self.picks), sum(held)) == (0, 0, 0, 0)
