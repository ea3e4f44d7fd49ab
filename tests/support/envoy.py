"""A real Envoy before a router of the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from stoker.common.config import load
from stoker.local.ports import PortPicker
from stoker.local.process import last_lines
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.envoy.binary import binary, command
from stoker.router.envoy.bootstrap import bootstrap
from tests.support.waiting import eventually

_START_S = 30.0


def as_it_listens(app: RouterApp, *settings: str) -> RouterConfig:
    """A router's settings with the ports that it has."""
    assert app.envoy is not None
    ports = {"grpc": app.rpc.port, "http": app.http_port, "ext_authz": app.envoy.port.number}
    return load(RouterConfig, None, [*(f"listen.{name}=127.0.0.1:{port}" for name, port in ports.items()), *settings])


@contextlib.asynccontextmanager
async def running_envoy(app: RouterApp, folder: Path, *settings: str) -> AsyncIterator[str]:
    """An Envoy that asks this router; its base URL."""
    port = PortPicker().pick()
    async with started(bootstrap(as_it_listens(app, *settings), f"127.0.0.1:{port}"), port, folder) as url:
        yield url


@contextlib.asynccontextmanager
async def running_gateway(app: RouterApp, engines: Sequence[str], folder: Path, body_mode: str) -> AsyncIterator[str]:
    """An Envoy as a gateway that speaks the endpoint-picker protocol with this router; its base URL."""
    assert app.ext_proc is not None
    port = PortPicker().pick()
    async with started(gateway(port, app.ext_proc.port, app.http_port, engines, body_mode), port, folder) as url:
        yield url


def gateway(port: int, picker: int, other: int, engines: Sequence[str], body_mode: str) -> dict[str, Any]:
    """A gateway's configuration: an inference pool by `ext_proc` and `override_host`; /health goes to `other`."""
    kind, sends = "type.googleapis.com/envoy.extensions", body_mode == "FULL_DUPLEX_STREAMED"
    processing = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": body_mode,
        "response_body_mode": body_mode if sends else "NONE",
        "request_trailer_mode": "SEND" if sends else "SKIP",
        "response_trailer_mode": "SEND",
    }
    ext_proc = {
        "@type": f"{kind}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": processing,
        "message_timeout": "30s",
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    retries = {"retry_on": "connect-failure,reset,gateway-error", "num_retries": 2}
    off = {"@type": f"{kind}.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
    routes = [
        {
            "match": {"prefix": "/health"},
            "route": {"cluster": "other"},
            "typed_per_filter_config": {"envoy.filters.http.ext_proc": off},
        },
        {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retries}},
    ]
    router = {"@type": f"{kind}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{kind}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    listener = {
        "address": _at(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{kind}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{kind}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [{"typed_extension_config": robin}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    pool = {
        **_static("pool", *(int(url.rpartition(":")[2]) for url in engines)),
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }
    options = f"{kind}.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": options, "explicit_http_config": {"http2_protocol_options": {}}}
    grpc = {"typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}}
    clusters = [pool, {**_static("picker", picker), **grpc}, _static("other", other)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _at(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _static(name: str, *ports: int) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _at(port)}} for port in ports]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment}


@contextlib.asynccontextmanager
async def started(config: dict[str, Any], port: int, folder: Path) -> AsyncIterator[str]:
    """An Envoy with this configuration, which listens on this port; its base URL."""
    program = binary()
    file = folder / "envoy.json"
    file.write_bytes(msgspec.json.encode(config))
    argv = command(program, file, threads=1)
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        await _serves(process, f"http://127.0.0.1:{port}", folder / "envoy.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            os.kill(process.pid, 9)
            await process.wait()


async def _serves(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with aiohttp.ClientSession() as session:

        async def serves() -> bool:
            assert process.returncode is None, f"Envoy ended: {last_lines(log)}"
            async with session.get(f"{url}/health") as answer:
                return answer.status == 200

        await eventually(serves, f"Envoy serves; its log is {log}", _START_S, not_yet=(aiohttp.ClientError,))
