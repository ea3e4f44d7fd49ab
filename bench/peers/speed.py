"""Speed: requests/s at many clients and latency at one, through each router to engines that answer at once.

Client, router and engines share this machine: figures compare within one run, and with `direct` in it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import zmq

from bench.peers.backends import Backend, Backends
from bench.peers.catalog import ROOT, Site
from bench.peers.children import child, cpu_s, until_it_answers, until_it_says, until_it_serves
from bench.peers.install import NotRunnable
from bench.peers.speed_client import Job, Reading
from bench.peers.told_router import SERVING
from stoker.bench.stats import order
from stoker.common.config import load
from stoker.router.config import RouterConfig
from stoker.router.envoy.binary import command
from stoker.router.envoy.bootstrap import bootstrap

MANY = 64
_FIRST = 4
_MARGIN_S = 90.0
_MODEL = "tiny"
_ENGINES = 4

Say = Callable[[str], None]


@dataclass(frozen=True)
class Runner:
    """Something to ask."""

    name: str
    url: str
    path: str = "/v1/completions"
    token_ids: bool = False
    note: str = ""
    ranked: bool = True
    """False for what is no rival of the others: it relays nothing, or routes nothing."""


@dataclass
class Times:
    """One runner's readings at one prompt size."""

    many: list[Reading] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Of the routers' processes, a request at many clients."""
    one: list[Reading] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True)
class Speed:
    """Medians over rounds."""

    name: str
    prompt_bytes: int
    requests_per_s: float | None
    p99_ms: float | None
    """At many clients."""
    one_client_p50_ms: float | None
    cpu_us: float | None
    """CPU time of its processes for a request at many clients: what can be compared on a machine with other work."""
    errors: int
    note: str = ""
    ranked: bool = True


@asynccontextmanager
async def engines(site: Site, model_dir: Path) -> AsyncIterator[Backends]:
    """The static engines, in a process of their own. No KV events come, but some routers want an address."""
    log = site.log("static engines")
    ports = [site.ports.pick() for _ in range(_ENGINES)]
    argv = [sys.executable, "-m", "bench.peers.static", "--model-dir", str(model_dir), *map(str, ports)]
    with zmq.Context() as context, ExitStack() as silent:
        each = []
        for port in ports:
            events = silent.enter_context(context.socket(zmq.PUB)).bind_to_random_port("tcp://127.0.0.1")
            each.append(Backend(f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}"))
        async with child(argv, log, cwd=ROOT) as process:
            for backend in each:
                await until_it_serves(process, log, f"{backend.url}/health")
            yield Backends(tuple(each), _MODEL, str(model_dir), block_size=32, total_blocks=300)


@asynccontextmanager
async def stoker(backends: Backends, site: Site) -> AsyncIterator[str]:
    """Stoker's router as it is by default, before the static engines; its base URL."""
    async with _router(backends, site, "stoker router", {}) as listens:
        yield f"http://{listens['http']}"


@asynccontextmanager
async def stoker_by_envoy(backends: Backends, site: Site, program: Path, workers: int = 1) -> AsyncIterator[str]:
    """The same router, in so many processes, with an Envoy that carries the tokens; Envoy's base URL.

    Raises NotRunnable.
    """
    name = f"stoker envoy {workers}"
    port, log, file = site.ports.pick(), site.log(name), site.logs / f"stoker-envoy-{workers}.json"
    asked = {"ext_authz": f"127.0.0.1:{site.ports.pick()}"}
    async with _router(backends, site, f"router of {name}", asked, workers) as listens:
        config = load(RouterConfig, None, [f"listen.{name}={address}" for name, address in listens.items()])
        file.write_bytes(msgspec.json.encode(bootstrap(config, f"127.0.0.1:{port}")))
        async with child(command(program, file), log) as process:
            await until_it_answers(process, log, f"http://127.0.0.1:{port}", backends.model)
            yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _router(
    backends: Backends, site: Site, name: str, more: dict[str, str], workers: int = 1
) -> AsyncIterator[dict[str, str]]:
    listens = {part: f"127.0.0.1:{site.ports.pick()}" for part in ("http", "grpc")} | more
    argv = [sys.executable, "-m", "bench.peers.told_router", "--model-dir", backends.model_dir]
    for part, address in listens.items():
        argv += ["--listen", f"{part}={address}"]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        for number in range(workers):
            log = site.log(f"{name}, worker {number}")
            worker = ["--worker", folder, str(number), str(workers)]
            process = await stack.enter_async_context(child([*argv, *worker, *backends.urls], log, cwd=ROOT))
            await until_it_says(process, log, SERVING)  # they share their ports: any may answer
        await until_it_answers(process, log, f"http://{listens['http']}", backends.model)
        yield listens


async def measure(
    runners: Sequence[Runner],
    sizes: Sequence[int],
    *,
    rounds: int,
    seconds: float,
    seed: int,
    say: Say,
    engines: frozenset[int] = frozenset(),
    fresh: bool = False,
) -> list[Speed]:
    """All runners at each prompt size, in turns, medians over rounds.

    `engines` are processes whose CPU time is no router's. `fresh`: no prompt comes twice.
    """
    times = {(runner.name, size): Times() for runner in runners for size in sizes}
    by_name = {runner.name: runner for runner in runners}
    for size in sizes:
        for number in range(rounds):
            for name in order(list(by_name), number):
                say(f"speed, {size} bytes, {name}, round {number + 1}/{rounds}")
                job = Job(by_name[name].url, by_name[name].path, _MODEL, size, MANY, seconds, seed, fresh=fresh)
                await _round(by_name[name], times[name, size], job, engines, first=number == 0)
    return [_speed(by_name[name], size, found) for (name, size), found in times.items()]


async def _round(runner: Runner, times: Times, job: Job, engines: frozenset[int], *, first: bool) -> None:
    if times.failure:
        return
    many = replace(job, token_ids=runner.token_ids)
    try:
        if first and not job.fresh:
            # Whatever a router remembers of prompts, it has seen each of these when it is measured. Few at a time:
            # those that tokenize give long prompts up that wait too long.
            await _read(replace(many, clients=_FIRST, once=True))
        before = cpu_s(engines)
        times.many.append(await _read(many))
        times.cpu_us.append(1e6 * (cpu_s(engines) - before) / max(1, times.many[-1].answered))
        times.one.append(await _read(replace(many, clients=1, seconds=job.seconds / 2)))
    except NotRunnable as error:
        times.failure = str(error)


async def _read(job: Job) -> Reading:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.peers.speed_client", json.dumps(asdict(job))),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(job.seconds + _MARGIN_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise NotRunnable("its clients did not end in time") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise NotRunnable(f"its clients failed: {errors.decode('utf-8', 'replace').strip().splitlines()[-1]}")
    return Reading(**json.loads(output))


def _speed(runner: Runner, size: int, times: Times) -> Speed:
    return Speed(
        name=runner.name,
        prompt_bytes=size,
        requests_per_s=median(r.requests_per_s for r in times.many) if times.many else None,
        p99_ms=median(r.p99_ms for r in times.many) if times.many else None,
        one_client_p50_ms=median(r.p50_ms for r in times.one) if times.one else None,
        cpu_us=median(times.cpu_us) if times.cpu_us else None,
        errors=sum(r.errors for r in (*times.many, *times.one)),
        note=times.failure or ", ".join(part for part in (runner.note, _cpu(times)) if part),
        ranked=runner.ranked and not times.failure,
    )


def _cpu(times: Times) -> str:
    return f"{median(times.cpu_us):.0f} µs of CPU each" if times.cpu_us else ""
