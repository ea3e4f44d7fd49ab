"""CPU time of one of Envoy's checks in the router, bytes in to bytes out, and of its access log entry.

    python -m bench.envoy_check [--prompt-bytes 2000] [--fresh] [--profile]

The prompts are those of `bench.peers`, each read once before, or none ever: no sockets, no Envoy, four replicas.
What threads spend is counted as well. From the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import re
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.peers.speed_client import Fresh, prompts
from stoker.api.envoy.v1 import access_log_pb2 as pb
from stoker.api.registry.v1 import registry_pb2
from stoker.common import collecting
from stoker.local.model import cached
from stoker.router.app import RouterApp
from stoker.router.envoy import access_log
from stoker.router.http.port import Connection
from tests.support.router import replica, running_router, tell, tokenizer_of

_CONNECTIONS = 64
_SETTINGS = ("listen.ext_authz=127.0.0.1:0", "parity=false", "checks.interval_s=600")
_FLIGHT = re.compile(rb"x-stoker-flight: (\w+)")


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass


def told(app: RouterApp) -> None:
    """Four replicas that are as quick as engines that answer at once."""
    sha256, tokenizer = tokenizer_of(cached())
    app.tokenizers.add(sha256, tokenizer)
    records = [
        replica(f"r{number}", f"http://127.0.0.1:{9 + number}", sha256=sha256, max_model_len=131_072)
        for number in range(4)
    ]
    tell(app, *records)
    loads = [registry_pb2.ReplicaLoad(replica_id=r.replica_id, epoch=1, prefill_tokens_per_s=5e6) for r in records]
    app.view.load(loads, app.router.clock())
    for target in app.view.targets.values():
        app.view.proved(target, "ok")


def requests(size: int) -> list[bytes]:
    made = []
    for prompt in prompts(0, size):
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        made.append(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    return made


def logged(answers: list[bytes]) -> bytes:
    """The access log of requests that ended well."""
    logs = pb.AccessLogs()
    for answer in answers:
        flight = _FLIGHT.search(answer)
        assert flight is not None, answer
        entry = logs.http_logs.log_entry.add()
        entry.request.request_headers[access_log.FLIGHT_HEADER] = flight.group(1).decode()
        entry.common_properties.access_log_type = pb.ACCESS_LOG_TYPE_DOWNSTREAM_END
        entry.common_properties.upstream_request_attempt_count = 1
        entry.common_properties.time_to_first_downstream_tx_byte.nanos = 10**6
        entry.response.response_code.value = 200
    return logs.SerializeToString()


async def measure(size: int, batches: int, *, fresh: bool, profile: bool) -> None:
    async with running_router(*_SETTINGS) as app:
        told(app)
        assert app.envoy is not None
        flights, shared = app.envoy.flights, app.envoy.port.connections
        pool: Sequence[bytes] = Fresh(requests(size)) if fresh else requests(size)
        lines: list[tuple[Connection, Any]] = [(shared.protocol(), Wire()) for _ in range(_CONNECTIONS)]
        for line, wire in lines:
            line.connection_made(wire)
        spent = {"check": 0.0, "access log": 0.0}

        async def batch(number: int) -> None:
            began = time.process_time()
            for place, (line, _) in enumerate(lines):
                line.data_received(pool[(number * _CONNECTIONS + place) % len(pool)])
            while not all(wire.written for _, wire in lines):  # noqa: ASYNC110 - first ones are read in threads
                await asyncio.sleep(0)
            spent["check"] += time.process_time() - began
            log = logged([wire.written.pop() for _, wire in lines])
            began = time.process_time()
            for entry in access_log.decoded(log).http_logs.log_entry:
                access_log.take(entry, flights)
            spent["access log"] += time.process_time() - began

        for number in range(4):
            await batch(number)
        collecting.settle()  # as the service does
        spent.update(dict.fromkeys(spent, 0.0))
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        for number in range(batches):
            await batch(number)
        profiler.disable()
        each = {name: 1e6 * seconds / batches / _CONNECTIONS for name, seconds in spent.items()}
        print(f"{size} bytes:", ", ".join(f"{name} {us:.0f} µs" for name, us in each.items()))
        if profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        for line, _ in lines:
            line.connection_lost(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-bytes", type=int, action="append", help="once per size; default: 2000 and 100000")
    parser.add_argument("--batches", type=int, default=40, help=f"of {_CONNECTIONS} requests each")
    parser.add_argument("--fresh", action="store_true", help="no body twice")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for size in options.prompt_bytes or [2_000, 100_000]:
        uvloop.run(measure(size, options.batches, fresh=options.fresh, profile=options.profile))


if __name__ == "__main__":
    main()
