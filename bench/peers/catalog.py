"""The routers that a user could pick instead: how each is started, with which policy.

Each runs with its own defaults; what is set beyond them are addresses, the engines' block size and, where a
policy needs them, the engines' KV events.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from bench.peers import envoy
from bench.peers.backends import Backends
from bench.peers.children import child, until_it_answers, until_it_serves
from bench.peers.install import DYNAMO, ENVOY, SGLANG_ROUTER, SMG, VLLM_ROUTER, NotRunnable, Package, install
from stoker.local.ports import PortPicker
from stoker.router.envoy.binary import command

_HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Site:
    """Where peers are installed and what they may use."""

    cache: Path
    logs: Path
    ports: PortPicker

    def log(self, name: str) -> Path:
        """Where one process writes."""
        return self.logs / f"{name.replace(' ', '-').replace('/', '-')}.log"


Start = Callable[["Peer", Path, Backends, Site], AbstractAsyncContextManager[str]]


@dataclass(frozen=True)
class Peer:
    """One router with one policy."""

    package: Package
    policy: str
    start: Start
    """From its `bin` directory to its base URL, for as long as the block lasts. Raises NotRunnable."""
    relays: bool = True
    """False for one that only decides: another process carries the tokens."""

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.package.project.removesuffix('-runtime').removesuffix('-server')} {self.policy}"

    @asynccontextmanager
    async def running(self, backends: Backends, site: Site) -> AsyncIterator[str]:
        """Its base URL, once a request has come back through it. Raises NotRunnable."""
        async with self.start(self, await install(self.package, site.cache), backends, site) as url:
            yield url


@asynccontextmanager
async def _router(
    peer: Peer, argv: list[str], url: str, backends: Backends, site: Site, env: dict[str, str] | None = None
) -> AsyncIterator[str]:
    log = site.log(peer.name)
    async with child(argv, log, env) as process:
        await until_it_answers(process, log, url, backends.model)
        yield url


def _rust_router(
    peer: Peer, bin_dir: Path, backends: Backends, site: Site, *, command: tuple[str, ...], kv_events: bool = False
) -> AbstractAsyncContextManager[str]:
    """vllm-router, smg and sglang-router come from one root: their command lines are alike."""
    port = site.ports.pick()
    argv = [
        str(bin_dir / command[0]),
        *command[1:],
        *("--host", _HOST, "--port", str(port)),
        *("--prometheus-host", _HOST, "--prometheus-port", str(site.ports.pick())),
        *("--policy", peer.policy),
        *("--worker-startup-check-interval", "1"),
        # A line for each request would be measured as well.
        *("--log-level", "warning" if command[0] == "vllm-router" else "warn"),
        *("--worker-urls", *backends.urls),
    ]
    if kv_events:
        for backend in backends.each:
            argv += ["--kv-event-source", f"{backend.url}={backend.events}"]
            if backend.replay:
                argv += ["--kv-event-replay-source", f"{backend.url}={backend.replay}"]
        argv += ["--kv-event-block-size", str(backends.block_size), "--kv-event-model", backends.model]
    return _router(peer, argv, f"http://{_HOST}:{port}", backends, site)


def _envoy(peer: Peer, bin_dir: Path, backends: Backends, site: Site) -> AbstractAsyncContextManager[str]:
    port = site.ports.pick()
    config = site.logs / "envoy.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(envoy.config(port, backends)))
    return _router(peer, command(bin_dir / "envoy", config), f"http://{_HOST}:{port}", backends, site)


@asynccontextmanager
async def select_service(peer: Peer, bin_dir: Path, backends: Backends, site: Site) -> AsyncIterator[str]:
    """Dynamo's select service alone, its workers registered: it decides and relays nothing.

    It listens on all interfaces and has no option not to.
    """
    port = site.ports.pick()
    url = f"http://{_HOST}:{port}"
    log = site.log(f"{peer.name}-service")
    argv = [str(bin_dir / "python"), "-m", "dynamo.select_service", "--port", str(port)]
    async with child(argv, log, {"DYN_LOG": "warn"}) as process:
        await until_it_serves(process, log, f"{url}/health")
        async with aiohttp.ClientSession() as session:
            for number, backend in enumerate(backends.each):
                worker = {
                    "worker_id": number,
                    "model_name": backends.model,
                    "endpoint": backend.url,
                    "block_size": backends.block_size,
                    "total_kv_blocks": backends.total_blocks,
                    "max_num_batched_tokens": backends.max_batched_tokens,
                }
                worker |= {"kv_events_endpoint": backend.events, "replay_endpoint": backend.replay or None}
                async with session.post(f"{url}/workers", json=worker) as answer:
                    if answer.status >= 300:
                        raise NotRunnable(f"refuses a worker: HTTP {answer.status} {(await answer.text())[:200]}")
        yield url


@asynccontextmanager
async def _dynamo(peer: Peer, bin_dir: Path, backends: Backends, site: Site) -> AsyncIterator[str]:
    """The service decides; a relay of ours tokenizes, asks it, carries the answer, and reports back."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(select_service(peer, bin_dir, backends, site))
        port, log = site.ports.pick(), site.log(f"{peer.name}-relay")
        argv = [sys.executable, "-m", "bench.peers.select_relay", "--port", str(port), "--service", service]
        argv += ["--model", backends.model, "--model-dir", backends.model_dir]
        relay = await stack.enter_async_context(child(argv, log, cwd=ROOT))
        url = f"http://{_HOST}:{port}"
        await until_it_answers(relay, log, url, backends.model)
        yield url


_vllm_router = partial(_rust_router, command=("vllm-router",))
_smg = partial(_rust_router, command=("smg", "launch"))
_sglang_router = partial(_rust_router, command=("python", "-m", "sglang_router.launch_router"))

PEERS: tuple[Peer, ...] = (
    Peer(VLLM_ROUTER, "round_robin", _vllm_router),
    Peer(VLLM_ROUTER, "cache_aware", _vllm_router),
    Peer(VLLM_ROUTER, "kv_aware", partial(_vllm_router, kv_events=True)),
    Peer(VLLM_ROUTER, "consistent_hash", _vllm_router),
    Peer(SMG, "cache_aware", _smg),
    Peer(SMG, "prefix_hash", _smg),
    Peer(SGLANG_ROUTER, "cache_aware", _sglang_router),
    Peer(ENVOY, "ring_hash", _envoy),
    Peer(DYNAMO, "select", _dynamo, relays=False),
)
