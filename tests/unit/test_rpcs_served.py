"""Every RPC in `proto/` is served: a servicer's generated base answers UNIMPLEMENTED for what was not written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest

import stoker.api
from stoker.node_agent import server as node_agent
from stoker.planner import server as planner
from stoker.registry import server as registry
from stoker.router import server as router
from stoker.router.config import LimitsConfig
from stoker.router.grpc.call import SERVICE
from stoker.router.grpc.inference import InferenceServer
from stoker.scaler import server as scaler

SERVERS = (node_agent, planner, registry, router, scaler)


def stubs(ending: str) -> Iterator[ModuleType]:
    """The generated modules, which lie in folders without `__init__.py`."""
    for root in map(Path, stoker.api.__path__):
        for file in sorted(root.rglob(f"*{ending}.py")):
            yield importlib.import_module(".".join(("stoker.api", *file.relative_to(root).with_suffix("").parts)))


def described() -> dict[str, set[str]]:
    """Every service of the contracts, with its methods."""
    return {
        service.full_name: {method.name for method in service.methods}
        for module in stubs("_pb2")
        for service in module.DESCRIPTOR.services_by_name.values()
    }


def base_of(service: str) -> type:
    """The generated class whose methods all raise."""
    package, _, name = service.rpartition(".")
    for module in stubs("_pb2_grpc"):
        base: type | None = getattr(module, f"{name}Servicer", None)
        if base is not None and module.__name__.startswith(f"{package}."):
            return base
    raise AssertionError(f"no stub of {service}")


def servicers(service: str) -> list[type]:
    """The classes of the product that serve it."""
    base = base_of(service)
    return [
        each
        for module in SERVERS
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, base) and each is not base
    ]


def handled() -> set[str]:
    """The methods that the router, which relays bytes, serves by handlers of its own."""
    given: list[grpc.GenericRpcHandler] = []
    server: Any = SimpleNamespace(add_generic_rpc_handlers=given.extend)
    nobody: Any = None  # nothing is called
    InferenceServer(nobody, nobody, LimitsConfig()).add_to(server)
    methods = described()[SERVICE]
    calls: dict[str, Any] = {name: SimpleNamespace(method=f"/{SERVICE}/{name}") for name in methods}
    return {name for name, call in calls.items() if any(handler.service(call) for handler in given)}


def test_the_contracts_are_found() -> None:
    assert len(described()) >= 6
    assert all(described().values())


@pytest.mark.parametrize("service", sorted(described()))
def test_every_rpc_is_served(service: str) -> None:
    base, serving = base_of(service), servicers(service)
    assert serving, f"nobody serves {service}"
    for servicer in serving:
        left = {name for name in described()[service] if getattr(servicer, name) is getattr(base, name)}
        assert not left, f"{servicer.__module__}.{servicer.__name__} leaves {left} to the generated base"


def test_the_router_serves_all_of_inference() -> None:
    assert handled() == described()[SERVICE]
