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

_HOST = "127.0.0.1"
_PORTS = {"etcd": 2379, "etcd-peer": 2380, "registry": 7310, "router": 7320, "http": 7380, "scaler": 7340}
_PLANNER_PORT, _AGENT_PORT = 7350, 7330

# Ranks of starting and stopping. Routers stop first, so that requests end where they run.
_ETCD, _REGISTRY, _REST = 0, 1, 2
_STOP_ROUTER, _STOP_DECIDERS, _STOP_AGENT, _STOP_REGISTRY, _STOP_ETCD = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class StackSpec:
    """What kind of stack is wanted."""

    engine: EngineKind = "sim"
    nodes: int = 3
    slots: int = 1
    """Replicas a node without accelerators may run."""
    routers: int = 1
    fixed_ports: bool = True
    """Prefer the documented ports; otherwise take free ones."""
    policy_header: bool = False
    """Let requests choose the routing policy, for measurements."""

    def __post_init__(self) -> None:
        for name, most in (("nodes", 64), ("slots", 64), ("routers", 16)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise InvalidRequest.field(name, f"must be from 1 to {most} on one machine, not {value}")


def make_plan(spec: StackSpec, home: Home, ports: PortPicker | None = None) -> Plan:
    """The processes of a stack, with ports that are free now."""
    picker = ports or PortPicker()

    def address(preferred: int) -> str:
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
    )
    services = [
        Service("etcd", tuple(etcd.argv()), Probe("etcd", etcd.endpoint), starts=_ETCD, stops=_STOP_ETCD),
        *(_registry(i, target, etcd.endpoint) for i, target in enumerate(endpoints.registry)),
        _decider("scaler", endpoints.scaler, endpoints),
        _decider("planner", endpoints.planner, endpoints),
        *(_agent(i, spec, home, endpoints) for i in range(spec.nodes)),
        *(_router(i, spec, home, endpoints) for i in range(spec.routers)),
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


def _router(number: int, spec: StackSpec, home: Home, endpoints: Endpoints) -> Service:
    target, http = endpoints.router[number], endpoints.http[number].removeprefix("http://")
    name = "router" if number == 0 else f"router-{number + 1}"
    argv = _command(
        "stoker-router",
        **{"listen.grpc": target, "listen.http": http, "tokenizer.cache_dir": str(home.run / f"{name}-tokenizers")},
        registries=_listed(endpoints.registry),
        allow_policy_header="true" if spec.policy_header else "false",
        drain_s="5",
    )
    return Service(name, argv, Probe("grpc", target), starts=_REST, stops=_STOP_ROUTER)


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
