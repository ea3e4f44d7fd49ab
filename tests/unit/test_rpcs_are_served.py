"""Generated servicers answer each RPC with "not implemented": whoever derives from one has to serve all of them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.router.grpc.call import SERVICE
from stoker.router.grpc.inference import InferenceServer

SERVICES = Path(__file__).resolve().parents[2] / "services"


def servicers() -> Iterator[type]:
    for path in sorted(SERVICES.rglob("*.py")):
        if path.name.endswith("_pb2_grpc.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Servicer") for base in node.bases):
                module = ".".join(path.with_suffix("").parts[len(SERVICES.parts) + 1 :])
                yield getattr(importlib.import_module(module), node.name)


def unserved(servicer: type) -> list[str]:
    generated = next(base for base in servicer.__mro__ if base.__module__.endswith("_pb2_grpc"))
    rpcs = [name for name, _ in inspect.getmembers(generated, inspect.isfunction)]
    return [name for name in rpcs if getattr(servicer, name) is getattr(generated, name)]


@pytest.mark.parametrize("servicer", list(servicers()), ids=lambda servicer: servicer.__name__)
def test_every_rpc_is_served(servicer: type) -> None:
    assert unserved(servicer) == []


def test_all_services_are_looked_at() -> None:
    modules = {servicer.__module__.split(".")[1] for servicer in servicers()}
    assert modules == {"node_agent", "planner", "registry", "router", "scaler"}


def test_a_servicer_that_leaves_one_out_is_found() -> None:
    whole = next(servicers())
    rpc = next(name for name in vars(whole) if name[0].isupper())
    generated = next(base for base in whole.__mro__ if base.__module__.endswith("_pb2_grpc"))
    partial = type("Partial", (generated,), {})
    assert rpc in unserved(partial)


def test_the_routers_own_inference_service_has_them_all() -> None:
    """It is registered by hand, as it relays bytes."""
    found: list[grpc.GenericRpcHandler] = []

    class Server:
        def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
            found.extend(handlers)

    InferenceServer.add_to(InferenceServer.__new__(InferenceServer), Server())  # type: ignore[arg-type]
    described = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]

    class Call:
        invocation_metadata = ()

        def __init__(self, method: str) -> None:
            self.method = f"/{SERVICE}/{method}"

    missing = [rpc.name for rpc in described.methods if found[0].service(Call(rpc.name)) is None]  # type: ignore[arg-type]
    assert missing == []
