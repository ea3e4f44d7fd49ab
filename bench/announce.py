"""What it costs that routers announce their dispatches: bytes, and CPU time on one core.

    python bench/announce.py [--keys 32 128] [-o json]

Without the network: making and packing a dispatch, the registry's checking and passing on to one watcher, and
taking it in at the other router, each per dispatch, in batches of 20 (1,000 requests/s, 20 ms).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import count
from random import Random
from time import process_time

from stoker.api.registry.v1 import registry_pb2
from stoker.common.blocks import pack_keys, unpack_keys
from stoker.registry.core import validation
from stoker.registry.core.outflow import Interest, Outflow
from stoker.router.core import Decision, Dispatched, Fleet, Reason, Replica, Request

BATCH, ROUNDS, RUNS = 20, 20, 15


def timed(action: Callable[[], object]) -> float:
    """Microseconds per dispatch, in the best of some runs: the machine may be busy with other things."""
    best = float("inf")
    for _ in range(RUNS):
        started = process_time()
        for _ in range(ROUNDS):
            action()
        best = min(best, process_time() - started)
    return 1e6 * best / (ROUNDS * BATCH)


def figures(keys: int) -> dict[str, float]:
    rng = Random(1)
    shown = range(3 * keys)
    fleet = Fleet()
    for number in range(100):
        fleet.put(Replica(f"chat-{number}"))
    requests = [Request([*shown, *(rng.getrandbits(64) for _ in range(keys))], 64 * keys) for _ in range(BATCH)]
    decision = Decision("chat-0", Reason.EXACT, 48 * keys, 16 * keys, False, shown_tokens=48 * keys)

    def make() -> bytes:
        batch = registry_pb2.AnnounceRequest(router_id="router-1:4711:01234567")
        for request in requests:
            told = Dispatched.of(request, decision)
            batch.dispatches.add(
                replica_id=told.replica,
                epoch=1,
                keys=pack_keys(told.keys),
                prefill_tokens=told.prefill_tokens,
                kv_tokens=told.kv_tokens,
                age_ms=12,
            )
        return batch.SerializeToString()

    sent = make()
    flow = Outflow(Interest.of(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_DISPATCHES])))

    def pass_on() -> bytes:
        batch = registry_pb2.AnnounceRequest.FromString(sent)
        good = [d for d in batch.dispatches if next(validation.dispatch("dispatches", d), None) is None]
        flow.dispatched(registry_pb2.Dispatches(router_id=batch.router_id, dispatches=good), 0.0)
        (message,) = flow.take_soft(0.0)
        return message.SerializeToString()

    passed = pass_on()
    clock = count(1)

    def take() -> None:
        now = 0.01 * next(clock)
        for dispatch in registry_pb2.WatchResponse.FromString(passed).dispatches.dispatches:
            told = Dispatched(
                dispatch.replica_id, unpack_keys(dispatch.keys), dispatch.prefill_tokens, dispatch.kv_tokens
            )
            fleet.overhear(told, now, now)

    return {
        "keys": keys,
        "bytes": round(len(passed) / BATCH),
        "make_us": round(timed(make), 1),
        "pass_on_us": round(timed(pass_on), 1),
        "take_us": round(timed(take), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="*", default=[8, 32, 128, 1024])
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows = [figures(keys) for keys in options.keys]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>12}" for value in row.values()))


if __name__ == "__main__":
    main()
