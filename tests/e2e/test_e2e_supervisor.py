"""The supervisor with a stack of etcd alone: what dies starts again, what cannot start is named."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.common.errors import StokerError
from stoker.local import process
from stoker.local.etcd import EtcdMember
from stoker.local.ports import PortPicker
from stoker.local.stack import LocalStack
from stoker.local.state import Endpoints, Home, Plan, Probe, Service, ServiceState
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[LocalStack]:
    made = LocalStack(Home(tmp_path / "home"))
    yield made
    await made.stop()
    assert process.writing_under(tmp_path) == []


def plan(stack: LocalStack, *more: Service, start_timeout_s: float = 20.0) -> Plan:
    ports = PortPicker()
    etcd = EtcdMember(stack.home.run / "etcd", ports.pick(), ports.pick())
    service = Service("etcd", tuple(etcd.argv()), Probe("http", etcd.endpoint), starts=0, stops=4)
    endpoints = Endpoints(etcd.endpoint, (), (), (), (), "", "")
    return Plan(str(stack.home.path), "sim", (service, *more), endpoints, start_timeout_s)


def python(name: str, code: str) -> Service:
    return Service(name, (sys.executable, "-c", code), Probe("grpc", "127.0.0.1:1"), starts=1, stops=0)


async def service_when(stack: LocalStack, name: str, wanted: str, restarts: int) -> ServiceState:
    def service() -> ServiceState | None:
        state = stack.state()
        assert state is not None
        found = next(s for s in state.services if s.name == name)
        return found if found.status == wanted and found.restarts >= restarts else None

    there: ServiceState = await eventually(service, f"{name} is {wanted}", 60.0)
    return there


async def test_what_is_killed_starts_again(stack: LocalStack) -> None:
    await stack.start(plan(stack), lambda _: None, tied=True)
    first = await service_when(stack, "etcd", "ready", 0)
    assert first.process is not None
    assert first.process.signal(signal.SIGKILL)
    second = await service_when(stack, "etcd", "ready", 1)
    assert second.process is not None
    assert second.process.pid != first.process.pid


async def test_what_ends_while_starting_is_named_with_its_last_words(stack: LocalStack) -> None:
    broken = python("broken", "print('no such luck'); raise SystemExit(3)")
    with pytest.raises(StokerError, match=r"(?s)broken ended with status 3.*\| no such luck") as raised:
        await stack.start(plan(stack, broken), lambda _: None)
    assert raised.value.reason == "START_FAILED"
    assert stack.state() is None
    assert process.writing_under(stack.home.path) == []


async def test_what_is_never_ready_is_named(stack: LocalStack) -> None:
    silent = python("silent", "import signal; signal.pause()")
    with pytest.raises(StokerError, match=r"silent was not ready after 2 s"):
        await stack.start(plan(stack, silent, start_timeout_s=2.0), lambda _: None)
    assert process.writing_under(stack.home.path) == []


async def test_a_program_that_does_not_exist_is_named(stack: LocalStack) -> None:
    missing = Service("missing", ("/nonexistent",), Probe("grpc", "127.0.0.1:1"), starts=1, stops=0)
    with pytest.raises(StokerError, match=r"cannot start missing \(/nonexistent\): No such file"):
        await stack.start(plan(stack, missing), lambda _: None)


async def test_two_stacks_do_not_share_a_home(stack: LocalStack) -> None:
    await stack.start(plan(stack), lambda _: None, tied=True)
    with pytest.raises(StokerError, match="already runs") as raised:
        await LocalStack(stack.home).start(plan(stack), lambda _: None)
    assert raised.value.reason == "STACK_RUNS"
    assert stack.state() is not None


async def test_of_two_starts_at_once_one_is_refused_and_the_other_runs(stack: LocalStack) -> None:
    other = LocalStack(stack.home)
    starts = (s.start(plan(s), lambda _: None, tied=True) for s in (stack, other))
    try:
        ended = await asyncio.gather(*starts, return_exceptions=True)
    finally:
        refused = [e.reason for e in ended if isinstance(e, StokerError)]
        state = stack.state()
        await other.stop()
    assert refused == ["STACK_RUNS"]
    assert state is not None


async def test_what_a_killed_supervisor_left_is_known_and_swept(stack: LocalStack) -> None:
    state = await stack.start(plan(stack), lambda _: None)
    await stack.sweep()
    assert stack.state() is not None, "what runs is not swept"
    assert not stack.lost()
    supervisor = state.supervisor
    assert supervisor is not None
    assert supervisor.signal(signal.SIGKILL)
    await eventually(lambda: not supervisor.alive(), "the supervisor is gone")
    assert stack.lost()
    await stack.sweep()
    assert not stack.lost()
    assert process.writing_under(stack.home.run) == []


async def test_what_cannot_be_started_again_is_tried_until_it_can(stack: LocalStack, tmp_path: Path) -> None:
    """The supervisor outlives it, and so do the others."""
    moved = tmp_path / "moved"
    made = plan(stack)
    program = tmp_path / "etcd"
    program.symlink_to(made.services[0].argv[0])
    first = replace(made.services[0], argv=(str(program), *made.services[0].argv[1:]))
    await stack.start(replace(made, services=(first,)), lambda _: None, tied=True)
    program.rename(moved)
    running = await service_when(stack, "etcd", "ready", 0)
    assert running.process is not None
    assert running.process.signal(signal.SIGKILL)
    await service_when(stack, "etcd", "restarting", 2)
    moved.rename(program)
    await service_when(stack, "etcd", "ready", 2)


async def test_orphans_are_ended_with_the_stack(stack: LocalStack) -> None:
    """An engine outlives its agent: what a dead service left behind is found by its log."""
    leaves = python("leaves", "import os, signal\nif os.fork(): os._exit(1)\nos.setsid(); signal.pause()")
    with pytest.raises(StokerError, match="leaves ended with status 1"):
        await stack.start(plan(stack, leaves), lambda _: None)
    assert process.writing_under(stack.home.path) == []
