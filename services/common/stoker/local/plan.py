"""Which processes make up a local stack, and with which settings."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.common.errors import InvalidRequest, StokerError
from stoker.local.etcd import EtcdMember
from stoker.local.ports import PortPicker
from stoker.local.state import Endpoints, Home, Plan, Probe, Service

EngineKind = Literal["sim", "vllm"]
DataPlane = Literal["router", "envoy"]

_HOST = "127.0.0.1"
_PORTS = {"etcd": 2379, "etcd-peer": 2380, "registry": 7310, "router": 7320, "http": 7380, "scaler": 7340}
_PLANNER_PORT, _AGENT_PORT, _ENVOY_PORT = 7350, 7330, 7480

# Ranks of starting and stopping. Routers stop first, so that requests end where they run; Envoy carries them so long.
_ETCD, _REGISTRY, _REST, _ENVOY = 0, 1, 2, 3
_STOP_ROUTER, _STOP_DECIDERS, _STOP_AGENT, _STOP_REGISTRY, _STOP_ETCD = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class StackSpec:
    """What kind of stack is wanted."""

    engine: EngineKind = "sim"
    nodes: int = 3
    slots: int = 1
    """Replicas a node without accelerators may run."""
    routers: int = 1
    workers: int = 1
    """Processes of each router."""
    fixed_ports: bool = True
    """Prefer the documented ports; otherwise take free ones."""
    policy_header: bool = False
    """Let requests choose the routing policy, for measurements."""
    data_plane: DataPlane = "router"
    """Who carries the tokens of OpenAI HTTP: routers, or an Envoy before each."""
    router_settings: tuple[str, ...] = ()
    """Further settings of each router, KEY=VALUE."""

    def __post_init__(self) -> None:
        for name, most in (("nodes", 64), ("slots", 64), ("routers", 16), ("workers", 64)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InvalidRequest.field(name, f"must be from 1 to {most} on one machine, not {value}")


def make_plan(spec: StackSpec, home: Home, ports: PortPicker | None = None) -> Plan:
    """The processes of a stack, with ports that are free now."""
    picker = ports or PortPicker()

    envoys = spec.routers if spec.data_plane == "envoy" else 0

    def address(preferred: int | None) -> str:
        return f"{_HOST}:{picker.pick(preferred if spec.fixed_ports else None)}"

    etcd = EtcdMember(
        data_dir=home.run / "etcd",
        client_port=picker.pick(_PORTS["etcd"] if spec.fixed_ports else None),
        peer_port=picker.pick(_PORTS["etcd-peer"] if spec.fixed_ports else None),
    )
    endpoints = Endpoints(
        etcd=etcd.endpoint,
        registry=(address(_PORTS["registry"]),),
        router=tuple(address(_PORTS["router"] + i) for i in range(spec.routers)),
        http=tuple(f"http://{address(_PORTS['http'] + i)}" for i in range(spec.routers)),
        agents=tuple(address(_AGENT_PORT + (i if i < 10 else 1000 + i)) for i in range(spec.nodes)),
        scaler=address(_PORTS["scaler"]),
        planner=address(_PLANNER_PORT),
        envoy=tuple(f"http://{address(_ENVOY_PORT + i)}" for i in range(envoys)),
    )
    checks = [address(None) for _ in range(envoys)]
    services = [
        Service("etcd", tuple(etcd.argv()), Probe("http", etcd.endpoint), starts=_ETCD, stops=_STOP_ETCD),
        *(_registry(i, target, etcd.endpoint) for i, target in enumerate(endpoints.registry)),
        _decider("scaler", endpoints.scaler, endpoints),
        _decider("planner", endpoints.planner, endpoints),
        *(_agent(i, spec, home, endpoints) for i in range(spec.nodes)),
        *(_router(i, spec, home, endpoints, checks) for i in range(spec.routers)),
        *(_envoy(i, home, endpoints, checks) for i in range(envoys)),
    ]
    return Plan(home=str(home.path), engine=spec.engine, services=tuple(services), endpoints=endpoints)


def _registry(number: int, target: str, etcd: str) -> Service:
    argv = _command("stoker-registry", listen=target, **{"etcd.endpoints": f"[{etcd!r}]"})
    name = "registry" if number == 0 else f"registry-{number + 1}"
    return Service(name, argv, Probe("grpc", target), starts=_REGISTRY, stops=_STOP_REGISTRY)


def _decider(name: str, target: str, endpoints: Endpoints) -> Service:
    argv = _command(f"stoker-{name}", listen=target, registries=_listed(endpoints.registry))
    return Service(name, argv, Probe("grpc", target), starts=_REST, stops=_STOP_DECIDERS)


def _agent(number: int, spec: StackSpec, home: Home, endpoints: Endpoints) -> Service:
    name, target = f"node-{number + 1}", endpoints.agents[number]
    argv = _command(
        "stoker-node-agent",
        listen=target,
        node_id=name,
        registries=_listed(endpoints.registry),
        state_dir=str(home.run / name),
        engines=f"[{spec.engine}]",
        python=sys.executable,
        cpu_slots=str(spec.slots),
    )
    return Service(name, argv, Probe("grpc", target), starts=_REST, stops=_STOP_AGENT)


def _router(number: int, spec: StackSpec, home: Home, endpoints: Endpoints, checks: list[str]) -> Service:
    target = endpoints.router[number]
    name = "router" if number == 0 else f"router-{number + 1}"
    argv = _command(
        "stoker-router",
        **_listening(number, endpoints, checks),
        **{"tokenizer.cache_dir": str(home.run / f"{name}-tokenizers")},
        registries=_listed(endpoints.registry),
        allow_policy_header="true" if spec.policy_header else "false",
        drain_s="5",
        workers=str(spec.workers),
    )
    for setting in spec.router_settings:
        argv += ("--set", setting)
    return Service(name, argv, Probe("grpc", target), starts=_REST, stops=_STOP_ROUTER)


def _envoy(number: int, home: Home, endpoints: Endpoints, checks: list[str]) -> Service:
    name = "envoy" if number == 0 else f"envoy-{number + 1}"
    target = endpoints.envoy[number].removeprefix("http://")
    argv = [sys.executable, "-m", "stoker.router.envoy", "--listen", target, "--run", str(home.run / f"{name}.json")]
    for key, value in _listening(number, endpoints, checks).items():
        argv += ["--set", f"{key}={value}"]
    return Service(name, tuple(argv), Probe("http", target), starts=_ENVOY, stops=_STOP_DECIDERS)


def _listening(number: int, endpoints: Endpoints, checks: list[str]) -> dict[str, str]:
    """Where a router listens, as it and its Envoy must both know."""
    settings = {
        "listen.grpc": endpoints.router[number],
        "listen.http": endpoints.http[number].removeprefix("http://"),
    }
    return {**settings, "listen.ext_authz": checks[number]} if checks else settings


def _listed(targets: tuple[str, ...]) -> str:
    # Quoted: YAML reads a bare 127.0.0.1:7310 in brackets as it pleases.
    return "[" + ", ".join(f'"{target}"' for target in targets) + "]"


def _command(script: str, **settings: str) -> tuple[str, ...]:
    argv = [_find(script)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    return tuple(argv)


def _find(script: str) -> str:
    """The console script of this very installation; one on the PATH may be of another."""
    beside = Path(sys.executable).parent / script
    found = str(beside) if beside.is_file() else shutil.which(script)
    if found is None:
        raise StokerError(
            f"{script} is not installed beside {sys.executable}; install the package anew: pip install -e '.[local]'",
            reason="NOT_INSTALLED",
        )
    return found
