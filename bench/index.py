"""What the view of a large fleet costs: memory, changes a second, and the time until a fresh router has it.

    python bench/index.py [-o json] [--replicas 100] [--blocks 20000] [--only memory updates sync]

memory   resident memory that `--replicas` sets of `--blocks` distinct blocks take in a fresh process
updates  changes of blocks a second on one core: parse the message, unpack its keys, apply it, in steps of several
         sizes (an agent tells about 20 steps a second)
sync     etcd, a registry and the agents of all replicas run as they do in a fleet; then a router's watch and view
         start in a process of their own, and time passes until they hold every block
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import numpy as np
import structlog

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import RegistryClient
from stoker.router import core
from stoker.router.fleet.view import View
from stoker.router.watching import Watching
from tests.support.etcd import EtcdServer
from tests.support.registry import Agent, RegistryProcess, assignment, node
from tests.support.waiting import eventually

REPLICAS_A_NODE = 10
STEPS = (50, 500)  # blocks stored, and as many removed, in one delta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=20_000, help="of each replica")
    parser.add_argument("--rounds", type=int, default=5, help="fresh routers, one after the other")
    parser.add_argument("--only", nargs="+", choices=("memory", "updates", "sync"))
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--role", choices=("memory", "router"), help=argparse.SUPPRESS)
    parser.add_argument("--registry", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if options.role == "memory":
        print(json.dumps(hold(options)))
        return
    if options.role == "router":
        print(json.dumps(asyncio.run(follow(options))))
        return
    wanted = options.only or ("memory", "updates", "sync")
    rows: list[dict[str, object]] = []
    if "memory" in wanted:
        rows.append({"what": f"memory of {size(options)}", **in_a_process(options, "memory")})
    if "updates" in wanted:
        rows += [updates(options, step) for step in STEPS]
    if "sync" in wanted:
        rows.append({"what": f"a fresh router's sync, {size(options)}", **asyncio.run(sync(options))})
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row.pop('what'):<62}", "  ".join(f"{name} {value:,}" for name, value in row.items()))


def size(options: argparse.Namespace) -> str:
    return f"{options.replicas * options.blocks:,} blocks over {options.replicas} replicas"


def in_a_process(options: argparse.Namespace, role: str, *more: str) -> dict[str, float]:
    """Run one part of this bench in a process of its own."""
    sizes = ("--replicas", str(options.replicas), "--blocks", str(options.blocks))
    command = [sys.executable, __file__, "--role", role, *sizes, "--begun", str(time.time()), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def keys_of(number: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.random.default_rng(number).integers(0, 2**64, count, np.uint64)


def snapshot_of(number: int, count: int, sequence: int = 1) -> registry_pb2.DigestUpdate:
    keys = keys_of(number, count)
    return registry_pb2.DigestUpdate(
        replica_id=f"chat-{number}",
        epoch=1,
        sequence=sequence,
        tier=common_pb2.TIER_GPU,
        snapshot=True,
        added=keys.astype("<u8").tobytes(),
        xor_digest=int(np.bitwise_xor.reduce(keys)),
        count=count,
    )


def view_of(replicas: int) -> View:
    """The view of a fleet of which no block is known yet."""
    view = View(core.RoutingConfig(), core.HealthConfig())
    engine = records_pb2.EngineInfo(http_url="http://127.0.0.1:8000", model_names=["m"], block_size=16)
    records = [
        records_pb2.Replica(replica_id=f"chat-{number}", deployment="chat", state=records_pb2.STATE_READY, epoch=1,
                            engine=engine)
        for number in range(replicas)
    ]  # fmt: skip
    view.records(registry_pb2.Records(replicas=records), now=0.0, snapshot=True)
    return view


def blocks_in(view: View) -> int:
    return sum(len(pool.fleet.index) for pool in view.pools.values())


def hold(options: argparse.Namespace) -> dict[str, float]:
    """Take every replica's snapshot, as it comes off the wire."""
    view = view_of(options.replicas)
    before = resident_mib()
    for number in range(options.replicas):
        packed = snapshot_of(number, options.blocks).SerializeToString()
        view.digest(registry_pb2.DigestUpdate.FromString(packed), 0.0)
    assert blocks_in(view) == options.replicas * options.blocks
    return {"MiB": round(resident_mib() - before)}


def updates(options: argparse.Namespace, step: int, steps: int = 20) -> dict[str, object]:
    """Replace blocks of a full index, `step` at a time, each replica in turn."""
    view = view_of(options.replicas)
    held = [keys_of(number, options.blocks) for number in range(options.replicas)]
    for number in range(options.replicas):
        view.digest(snapshot_of(number, options.blocks), 0.0)
    rng = np.random.default_rng(options.replicas)  # no key that is there
    rates = []
    for sequence in range(2, 2 + steps):
        wire = []
        for number, keys in enumerate(held):
            coming = rng.integers(0, 2**64, step, np.uint64)
            held[number] = after = np.concatenate([keys[step:], coming])
            told = registry_pb2.DigestUpdate(
                replica_id=f"chat-{number}",
                epoch=1,
                sequence=sequence,
                tier=common_pb2.TIER_GPU,
                added=coming.astype("<u8").tobytes(),
                removed=keys[:step].astype("<u8").tobytes(),
                xor_digest=int(np.bitwise_xor.reduce(after)),
                count=len(after),
            )
            wire.append(told.SerializeToString())
        begun = time.perf_counter()
        for packed in wire:
            assert view.digest(registry_pb2.DigestUpdate.FromString(packed), 0.0) is core.Sync.APPLIED
        rates.append(2 * step * len(wire) / (time.perf_counter() - begun))
    return {"what": f"changes in steps of {step} stored, {step} removed", "per_s": round(median(rates))}


async def sync(options: argparse.Namespace) -> dict[str, float]:
    """Fill a registry through agents, then start fresh routers, one after the other."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = EtcdServer(directory)
        etcd.start()
        stack.callback(etcd.kill)
        registry = RegistryProcess(etcd.endpoint, directory)
        registry.start()
        stack.callback(registry.kill)
        await registry.serving()
        client = await stack.enter_async_context(RegistryClient([registry.endpoint]))
        await fill(options, client, registry.endpoint, stack)
        rounds = [
            await asyncio.to_thread(in_a_process, options, "router", "--registry", registry.endpoint)
            for _ in range(options.rounds)
        ]
    return {name: round(median(each[name] for each in rounds), 2) for name in rounds[0]}


async def fill(options: argparse.Namespace, client: RegistryClient, registry: str, stack: AsyncExitStack) -> None:
    """Agents that run all replicas, each with its blocks told."""
    fence = (await client.acquire_leadership("planner", "bench", 30.0)).fence
    places = {f"chat-{number}": f"node-{number // REPLICAS_A_NODE}" for number in range(options.replicas)}
    agents = {}
    for node_id in dict.fromkeys(places.values()):
        agents[node_id] = await stack.enter_async_context(Agent([registry], node(node_id)))
    wanted = [assignment(replica_id, node_id) for replica_id, node_id in places.items()]
    for begin in range(0, len(wanted), 50):
        await client.apply_assignments(fence, wanted[begin : begin + 50])

    async def ready() -> bool:
        replicas = (await client.get_fleet()).records.replicas
        return len(replicas) == len(places) and all(each.state == records_pb2.STATE_READY for each in replicas)

    await eventually(ready, "all replicas are ready", 60)
    for number, node_id in enumerate(places.values()):
        agents[node_id].session.publish_digest(snapshot_of(number, options.blocks))
        await asyncio.sleep(0)  # lets the sessions send


async def follow(options: argparse.Namespace) -> dict[str, float]:
    """Be a router that has just started."""
    view = View(core.RoutingConfig(), core.HealthConfig())
    watching = Watching(view, (options.registry,), "bench", lambda: None)
    before, begun = resident_mib(), time.perf_counter()
    task = asyncio.create_task(watching.run())
    wanted = options.replicas * options.blocks
    synced_s = 0.0
    while blocks_in(view) < wanted:
        await asyncio.sleep(0.01)
        if view.synced and not synced_s:
            synced_s = time.perf_counter() - begun
        if time.perf_counter() - begun > 60:
            raise TimeoutError(f"{blocks_in(view):,} of {wanted:,} blocks after a minute")
    taken_s, with_imports_s = time.perf_counter() - begun, time.time() - options.begun
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return {
        "records_s": synced_s,
        "blocks_s": taken_s,
        "from_exec_s": with_imports_s,
        "MiB": resident_mib() - before,
    }


if __name__ == "__main__":
    main()
