"""How long a scaler's event loop stands still for the signals of a large fleet.

    python bench/scaler_loop.py [--deployments 200] [--replicas 10000] [--seconds 10]

Each replica reports twice a second, in messages of 200 replicas, and samples are due each two seconds. Milliseconds
of CPU: the longest and the mean of all events, all of them together for each second of the fleet's time, and what a
round takes from the loop before it thinks in a thread.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from statistics import fmean
from time import process_time

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import FleetView, LoadChanged
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.watching import Watching

WALL = 1.7e9
MESSAGE = 200
REPORTS_S = 0.5


def fleet(deployments: int, replicas: int) -> FleetView:
    """All ready, spread evenly."""
    view, records = FleetView(), list[tuple[Name, Record]]()
    for number in range(deployments):
        name, count = f"model{number}", replicas // deployments
        spec = common_pb2.DeploymentSpec(name=name, model=name, replicas=count)
        spec.scaling.kind = scaling_pb2.SCALING_KIND_SLO
        records.append(((Kind.DEPLOYMENTS, name), records_pb2.Deployment(spec=spec, generation=1)))
        records.append(((Kind.NODES, name), common_pb2.Node(node_id=name, labels={"rack": f"r{number % 20}"})))
        for ordinal in range(count):
            replica = records_pb2.Replica(
                replica_id=f"{name}-{ordinal}",
                deployment=name,
                state=records_pb2.STATE_READY,
                epoch=1,
                node_id=name,
                wanted=records_pb2.WANTED_RUN,
                generation=1,
                engine=records_pb2.EngineInfo(block_size=16, total_blocks=10_000, max_num_seqs=64),
            )
            replica.members.add(replica_id=replica.replica_id, node_id=name)
            records.append(((Kind.REPLICAS, replica.replica_id), replica))
    view.delta(records, (), 1)
    return view


def reports(view: FleetView, turn: int) -> Iterator[LoadChanged]:
    """What all replicas tell, a message after the other."""
    names = list(view.replicas)
    for at in range(0, len(names), MESSAGE):
        loads = [
            registry_pb2.ReplicaLoad(
                replica_id=name,
                epoch=1,
                sequence=turn,
                running=5,
                waiting=1,
                kv_usage=0.5,
                prefill_tokens_per_s=15_000.0,
                generation_tokens=100 * turn,
                prompt_tokens=1_000 * turn,
                cached_prompt_tokens=500 * turn,
                itl_sum_s=2.0 * turn,
                itl_count=100 * turn,
                prefill_sum_s=0.05 * turn,
            )
            for name in names[at : at + MESSAGE]
        ]
        yield LoadChanged(tuple(loads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    view = fleet(options.deployments, options.replicas)
    now, times, rounds = 0.0, list[float](), list[float]()
    watching = Watching(view, 2.0, lambda: WALL + now)
    for turn in range(1, round(options.seconds / REPORTS_S) + 1):
        messages = list(reports(view, turn))
        gc.collect()
        gc.freeze()  # what this bench makes is none of the scaler's
        for message in messages:
            now += REPORTS_S / len(messages)
            begun = process_time()
            watching.hear(message, now)
            times.append(1e3 * (process_time() - begun))
        begun = process_time()
        watching.catch_up(now)
        watching.fleet()
        watching.histories(now)
        rounds.append(1e3 * (process_time() - begun))
    made = sum(len(memory.samples) for memory in watching.memories.values())
    print(f"an event: {fmean(times):.2f} ms on average, {max(times):.1f} at most, {len(times):,} of them")
    print(f"a second: {sum(times) / options.seconds:.0f} ms; {made / options.deployments:.0f} samples a deployment")
    print(f"a round before it thinks: {fmean(rounds):.1f} ms on average, {max(rounds):.1f} at most")


if __name__ == "__main__":
    main()
