"""What agents measure of a deployment now: two looks at the registries, some seconds apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise

from stoker.api.common.v1 import common_pb2
from stoker.cli.addresses import Addresses, secured
from stoker.cli.fleet import Fleet, Registries
from stoker.cli.loop import run
from stoker.common.errors import NotFound
from stoker.planner import profiles
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.sizing.layout import Layout
from stoker.planner.core.sizing.measured import Measured

_APART_S = 10.0
_FLAGS = {"--tensor-parallel-size": "tp", "-tp": "tp", "--pipeline-parallel-size": "pp", "-pp": "pp",
          "--data-parallel-size": "dp", "-dp": "dp"}  # fmt: skip
_SIZE = re.compile(r"[1-9][0-9]{0,3}")


def of_deployment(name: str, registry: str, known: Facility, say: Callable[[str], None]) -> list[Measured]:
    """Prefill rates and steps of a deployment's replicas. Raises NotFound where there is no such deployment, or where
    its GPUs are none of the catalogue's."""

    async def work() -> tuple[Fleet, Fleet]:
        async with Registries(
            Addresses.find(registry=registry).require_registries(), secured(registry)
        ) as registries:
            first = await registries.fleet()
            say(f"looking at {name} for {_APART_S:g} s")
            await asyncio.sleep(_APART_S)
            return first, await registries.fleet()

    before, after = run(work())
    found = after.deployment(name)
    if found is None:
        raise NotFound(f"no deployment {name!r}; `stoker status` shows all")
    ids = {replica.replica_id for replica in after.replicas(name)}
    gpu = _gpu(after, ids, known)
    return profiles.of_agents(
        {key: load for key, load in before.loads.items() if key in ids},
        {key: load for key, load in after.loads.items() if key in ids},
        _APART_S,
        gpu,
        layout_of(found.spec),
    )


def layout_of(spec: common_pb2.DeploymentSpec) -> Layout:
    """As the engine's arguments say it; what they leave out is 1."""
    sizes = {"tp": 1, "pp": 1, "dp": 1}
    arguments = [part for argument in spec.engine_args for part in argument.split("=", 1)]
    for flag, value in pairwise(arguments):
        if flag in _FLAGS and _SIZE.fullmatch(value):
            sizes[_FLAGS[flag]] = int(value)
    return Layout(**sizes, expert_parallel="--enable-expert-parallel" in arguments)


def _gpu(fleet: Fleet, ids: set[str], known: Facility) -> str:
    nodes = {replica.node_id for replica in fleet.records.replicas if replica.replica_id in ids}
    names = {gpu.name for node in fleet.records.nodes if node.node_id in nodes for gpu in node.gpus}
    for name, kind in known.gpu_types.items():
        if names & {name, *kind.driver_names}:
            return name
    raise NotFound(f"its GPUs ({', '.join(sorted(names)) or 'none'}) are none of the catalogue; use --profile")
