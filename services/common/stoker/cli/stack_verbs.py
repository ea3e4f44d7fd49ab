"""Verbs about the stack on this machine: up, down, demo."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from stoker.cli import demo
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, Verbatim, own_name
from stoker.cli.serving import (
    DataPlaneChoice,
    EngineChoice,
    RouterSettingOption,
    Serving,
    lasting,
    router_settings,
)
from stoker.local.deployment import LocalDeployment, has_gpu
from stoker.local.etcd import DEVELOPMENT_NOTICE
from stoker.local.plan import StackSpec
from stoker.local.stack import LocalStack
from stoker.local.state import Home, StackState
from stoker.router.envoy.binary import binary

EngineOption = Annotated[EngineChoice, typer.Option("--engine", help="vllm, or sim to simulate it.")]
DataPlaneOption = Annotated[
    DataPlaneChoice,
    typer.Option("--data-plane", help="Who carries tokens: the router, or Envoy before it."),
]
ReplicasOption = Annotated[int, typer.Option("--replicas", min=1, max=64, help="Replicas of the model.")]
ModelOption = Annotated[
    str, typer.Option("--model", help="Model directory or hub id. Default: a tiny model, built here.")
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(epilog="Example: stoker up --engine sim --replicas 3")(up)
    app.command(epilog="Example: stoker down")(down)
    app.command("demo", epilog="Example: stoker demo --engine sim")(demo.demo)


def up(
    engine: EngineOption = EngineChoice.SIM,
    replicas: ReplicasOption = 3,
    model: ModelOption = "",
    nodes: Annotated[int, typer.Option("--nodes", min=0, max=64, help="Node agents; 0 for one a replica.")] = 0,
    routers: Annotated[int, typer.Option("--routers", min=1, max=16, help="Routers side by side.")] = 1,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Processes of each router.")] = 1,
    data_plane: DataPlaneOption = DataPlaneChoice.ROUTER,
    setting: RouterSettingOption = None,
    detach: Annotated[
        bool, typer.Option("--detach/--foreground", help="Leave it running, or stop it at Ctrl-C.")
    ] = True,
    output: FormatOption = Format.TEXT,
) -> None:
    """Start a whole stack on this machine: etcd, registry, planner, scaler, router, agents, replicas."""
    home, out = Home.default(), Output(output)
    stack = LocalStack(home)
    running = stack.state()
    if running is not None:
        value = _value(running, "")
        out.result({**value, "already_running": True}, f"already running ({running.engine}):", *_endpoints(running))
        out.note("stop it with `stoker down`; see more with `stoker status`")
        return
    deployment = LocalDeployment(engine.value, replicas, model, on_gpu=has_gpu())
    node_count = nodes or replicas
    slots = -(-replicas // node_count)
    # `bench routing --stack` compares policies on this stack.
    spec = StackSpec(
        engine.value,
        nodes=node_count,
        slots=slots,
        routers=routers,
        workers=workers,
        policy_header=True,
        data_plane=data_plane.value,
        router_settings=router_settings(setting),
    )

    async def work() -> None:
        if data_plane is DataPlaneChoice.ENVOY:
            binary()  # rather than after all else has started
        with out.progress() as progress:
            serving = await lasting(spec, deployment, home, progress.say)
        _show_up(out, serving)
        if not detach:
            try:
                await _until_ended(stack)
            finally:
                with out.progress() as progress:
                    progress.say("stopping")
                    await asyncio.shield(stack.stop())

    run(work())


async def _until_ended(stack: LocalStack) -> None:
    while stack.state() is not None:  # noqa: ASYNC110 - another process; there is nothing to await
        await asyncio.sleep(0.5)


def _show_up(out: Output, serving: Serving) -> None:
    state, name = serving.state, serving.deployment.name
    stoker = own_name()
    requests = example_requests(state, name)
    out.result(
        _value(state, name),
        f"[bold green]{name}[/] is served by {serving.deployment.replicas} replicas ({state.engine})",
        *_endpoints(state),
        "",
        *(Verbatim(f"# {about}\n{command}\n") for about, command in requests.items()),
        f"[dim]etcd here: {DEVELOPMENT_NOTICE}. See it all: `{stoker} status`. Stop it: `{stoker} down`.[/]",
    )


def example_requests(state: StackState, model: str) -> dict[str, str]:
    """Requests to copy and paste, by what they show."""
    prompt = "Once upon a time"
    generate = json.dumps({"model": model, "text": prompt, "sampling": {"max_tokens": 16}})
    complete = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "stream": True})
    method = "stoker.api.inference.v1.InferenceService/Generate"
    return {
        "gRPC": f"grpcurl -plaintext -d '{generate}' {state.endpoints.router[0]} {method}",
        "OpenAI HTTP": f"curl -N {(state.endpoints.envoy or state.endpoints.http)[0]}/v1/completions "
        f"-H 'content-type: application/json' -d '{complete}'",
    }


def _endpoints(state: StackState) -> list[str]:
    e = state.endpoints
    return [
        *([f"  OpenAI HTTP by Envoy  {', '.join(f'{url}/v1' for url in e.envoy)}"] if e.envoy else []),
        f"  OpenAI HTTP  {', '.join(f'{url}/v1' for url in e.http)}",
        f"  router gRPC  {', '.join(e.router)}",
        f"  registry     {', '.join(e.registry)}",
        f"  node agents  {', '.join(e.agents)}",
        f"  etcd         {e.etcd}",
    ]


def _value(state: StackState, model: str) -> dict[str, Any]:
    e = state.endpoints
    return {
        "engine": state.engine,
        "model": model or None,
        "phase": state.phase,
        "endpoints": {
            "http": [f"{url}/v1" for url in e.http],
            "envoy": [f"{url}/v1" for url in e.envoy],
            "router": list(e.router),
            "registry": list(e.registry),
            "agents": list(e.agents),
            "scaler": e.scaler,
            "planner": e.planner,
            "etcd": e.etcd,
        },
        "requests": example_requests(state, model) if model else {},
        "already_running": False,
    }


def down(
    keep: Annotated[bool, typer.Option("--keep-logs", help="Leave logs and data where they are.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Stop the stack on this machine, engines included; only what it started is touched."""
    home, out = Home.default(), Output(output)

    async def work() -> int:
        stack = LocalStack(home)
        with out.progress() as progress:
            ended = await stack.stop(lambda s: progress.say(f"stopping, {_left(s)} services left"))
        for part in ("demo", "bench"):
            ended += await _stop_orphans(Home(home.path / part))
        if not keep:
            stack.clear()
        return ended

    ended = run(work())
    out.result({"ended": ended}, f"stopped {ended} processes" if ended else "nothing was running")


async def _stop_orphans(home: Home) -> int:
    """End what a killed demo or bench left; one that runs is not touched."""
    stack = LocalStack(home)
    if not home.path.is_dir() or stack.state() is not None:
        return 0
    ended = await stack.stop()
    stack.clear()
    return ended


def _left(state: StackState) -> int:
    return sum(s.status != "stopped" for s in state.services)
