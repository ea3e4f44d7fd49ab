"""The structure that every reader relies on, kept by machine."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPURE = {"asyncio", "grpc", "etcd3aio", "time", "random", "aiohttp", "socket", "os", "datetime", "threading", "zmq"}
IMPURE_STOKER = ("stoker.etcd", "stoker.common.rpc", "stoker.registry.client")
CORES = sorted(p for p in (ROOT / "services").glob("*/stoker/*/core/**/*.py"))
SERVICES = {
    "registry": "registry",
    "router": "router",
    "node-agent": "node_agent",
    "scaler": "scaler",
    "planner": "planner",
}


def _imports(path: Path) -> set[str]:
    """Modules imported at run time: what stands under TYPE_CHECKING is for readers only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from random import Random` names a type that a core takes as a value.
            if node.module == "random" and all(alias.name == "Random" for alias in node.names):
                continue
            found.add(node.module)
    return found


def test_cores_exist_for_every_service() -> None:
    rooms = {p.relative_to(ROOT / "services").parts[2] for p in CORES}
    assert set(SERVICES.values()) <= rooms


@pytest.mark.parametrize("path", CORES, ids=lambda p: str(p.relative_to(ROOT / "services")))
def test_core_is_pure(path: Path) -> None:
    own = ".".join(path.relative_to(ROOT / "services").parts[1:-1])
    bad = {
        m
        for m in _imports(path)
        # Messages are values; stubs are not.
        if m.split(".")[0] in IMPURE or m.endswith("_pb2_grpc") or (m.startswith(IMPURE_STOKER) and own not in m)
    }
    assert not bad, f"{path} decides, so it may not import {sorted(bad)}: take values, now and rng as arguments"


@pytest.mark.parametrize(("folder", "package"), SERVICES.items())
def test_every_service_has_the_same_rooms(folder: str, package: str) -> None:
    home = ROOT / "services" / folder / "stoker" / package
    for room in ("core/__init__.py", "server.py", "app.py", "config.py"):
        assert (home / room).exists(), f"{package} lacks {room}"


def test_namespace_has_no_init() -> None:
    stray = list((ROOT / "services").glob("*/stoker/__init__.py"))
    assert not stray, f"{stray} would hide every other root of the stoker namespace"
