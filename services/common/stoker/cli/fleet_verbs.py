"""Verbs about the fleet: status, deploy, scale, delete, drain, logs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import grpc
import typer

from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.api.registry.v1.records_pb2 import Deployment
from stoker.cli import deployment_file, report
from stoker.cli.addresses import Addresses, PlannerOption, RegistryOption, RouterOption, secured
from stoker.cli.fleet import Fleet, Registries, explained, wait_settled
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output
from stoker.cli.parity import parity
from stoker.cli.scaler_report import kind_name
from stoker.common import rpc
from stoker.common.errors import Conflict, InvalidRequest, NotFound
from stoker.common.tls import Tls
from stoker.registry.core import documents

WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is so.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, max=86_400, help="Longest wait, in seconds.")]

drain = typer.Typer(help="Take a node or a replica out of service without losing a request.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(epilog="Example: stoker status -o json | jq '.replicas[].state'")(status)
    app.command(epilog="Example: stoker deploy -f examples/tiny-sim.yaml")(deploy)
    app.command(epilog="Example: stoker scale tiny 5")(scale)
    app.command(epilog="Example: stoker delete tiny --yes")(delete)
    app.command(epilog="Example: stoker logs tiny-0 --follow")(logs)
    app.add_typer(drain, name="drain")


def status(
    deployment: Annotated[str, typer.Argument(help="Only this deployment.", show_default=False)] = "",
    registry: RegistryOption = "",
    router: RouterOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show nodes, deployments, replicas with load and hit rate, what has no place and why, leaders, and freshness.

    Routers that are named say which replicas tokenize otherwise than they do.
    """
    addresses = Addresses.find(registry, router, planner)
    out = Output(output)

    async def work() -> tuple[Fleet, dict[str, str]]:
        async with Registries(addresses.require_registries(), secured(registry), addresses.planners) as registries:
            return await asyncio.gather(registries.fleet(), parity(addresses.routers, secured(router)))

    fleet, alike = run(work())
    if deployment and fleet.deployment(deployment) is None:
        raise NotFound(f"deployment {deployment!r} does not exist")
    value = report.as_json(fleet, alike, addresses.local, deployment)
    out.result(value, *report.as_tables(value))


def deploy(
    file: Annotated[Path, typer.Option("-f", "--file", help="YAML file with a deployment; see examples/.")],
    wait: WaitOption = True,
    timeout: TimeoutOption = 900.0,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Create or change a deployment from a YAML file."""
    spec = deployment_file.read(file)
    addresses = Addresses.find(registry, planner=planner)
    endpoints, planners = addresses.require_registries(), addresses.planners
    out = Output(output)

    async def work() -> Deployment:
        async with Registries(endpoints, secured(registry), planners) as registries:
            written = await registries.client.put_deployment(spec)
            if wait:
                with out.progress() as progress:
                    await wait_settled(registries, spec.name, timeout_s=timeout, say=progress.say)
            return written

    deployment = run(work())
    value = {
        "deployment": spec.name,
        "generation": deployment.generation,
        "replicas": spec.replicas,
        "policy": kind_name(spec.scaling),
        "ready": wait,
    }
    if (kind := kind_name(spec.scaling)) != "fixed":
        ready = f"its count found by {kind}" + (", all ready" if wait else "; follow with `stoker status`")
    else:
        ready = f"{spec.replicas} ready" if wait else f"{spec.replicas} wanted; follow with `stoker status`"
    out.result(value, f"{spec.name}: generation {deployment.generation}, {ready}")


def scale(
    deployment: Annotated[str, typer.Argument(help="The deployment.")],
    replicas: Annotated[int, typer.Argument(min=0, max=10_000, help="Replicas wanted.")],
    wait: WaitOption = True,
    timeout: TimeoutOption = 900.0,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Change how many replicas a deployment has."""
    addresses = Addresses.find(registry, planner=planner)
    endpoints, planners = addresses.require_registries(), addresses.planners
    out = Output(output)

    async def work() -> int:
        async with Registries(endpoints, secured(registry), planners) as registries:
            answer = await registries.client.scale_deployment(deployment, replicas)
            if wait:
                with out.progress() as progress:
                    await wait_settled(registries, deployment, timeout_s=timeout, say=progress.say)
            return answer.previous_replicas

    previous = run(work())
    value = {"deployment": deployment, "previous": previous, "replicas": replicas, "ready": wait}
    done = "" if wait else "; follow with `stoker status`"
    out.result(value, f"{deployment}: from {previous} to {replicas} replicas{done}")


def delete(
    deployment: Annotated[str, typer.Argument(help="The deployment.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask; without a terminal none is asked.")] = False,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Remove a deployment; its replicas finish their requests and stop."""
    endpoints = Addresses.find(registry).require_registries()
    out = Output(output)

    async def look() -> Fleet:
        async with Registries(endpoints, secured(registry)) as registries:
            return await registries.fleet()

    async def work() -> None:
        async with Registries(endpoints, secured(registry)) as registries:
            await registries.client.delete_deployment(deployment)

    fleet = run(look())
    if fleet.deployment(deployment) is None:
        raise NotFound(f"deployment {deployment!r} does not exist")
    leaving = sorted(r.replica_id for r in fleet.replicas(deployment))
    if sys.stdin.isatty() and not yes:
        # Not typer's own question: it writes to stdout, too.
        out.note(f"Delete deployment {deployment} and its {len(leaving)} replicas? \\[y/N]")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise Conflict(f"deployment {deployment!r} is left as it is", reason="NOT_CONFIRMED")
    run(work())
    value = {"deployment": deployment, "deleted": True, "replicas": leaving}
    leave = f"; leaving: {', '.join(leaving)}" if leaving else ""
    out.result(value, f"{deployment}: deleted{leave}")


@drain.command("node", epilog="Example: stoker drain node node-2")
def drain_node(
    name: Annotated[str, typer.Argument(help="The node.")],
    undo: Annotated[bool, typer.Option("--undo", help="Make it usable again.")] = False,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Place nothing new on a node and move its replicas away, or undo that."""
    endpoints = Addresses.find(registry).require_registries()
    out = Output(output)

    async def work() -> list[str]:
        async with Registries(endpoints, secured(registry)) as registries:
            return list(await registries.client.drain_node(name, undo=undo))

    there = run(work())
    value = {"node": name, "draining": not undo, "replicas": there}
    leave = (
        f"; moving where there is room: {', '.join(there)}; follow with `stoker status`" if there and not undo else ""
    )
    out.result(value, f"{name}: {'usable again' if undo else 'draining'}{leave}")


@drain.command("rack", epilog="Example: stoker drain rack r7")
def drain_rack(
    name: Annotated[str, typer.Argument(help="The rack, as the facility or the nodes' label `rack` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Make its nodes usable again.")] = False,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Place nothing new on the nodes of a rack and move their replicas away, or undo that."""
    endpoints = Addresses.find(registry).require_registries()
    out = Output(output)

    async def work() -> dict[str, list[str]]:
        async with Registries(endpoints, secured(registry)) as registries:
            nodes = await nodes_of_rack(registries, name)
            return {node: list(await registries.client.drain_node(node, undo=undo)) for node in nodes}

    there = run(work())
    replicas = sorted({replica for each in there.values() for replica in each})
    value = {"rack": name, "draining": not undo, "nodes": list(there), "replicas": replicas}
    leave = f"; moving where there is room: {', '.join(replicas)}" if replicas and not undo else ""
    out.result(value, f"{name}: {', '.join(there)} {'usable again' if undo else 'draining'}{leave}")


async def nodes_of_rack(registries: Registries, rack: str) -> list[str]:
    """Nodes that are there and stand in `rack`: by the facility where it lists them, else by their label."""
    nodes = (await registries.fleet()).records.nodes
    racks = {node.node_id: node.labels.get("rack", "") for node in nodes}
    record = await registries.facility()
    if record is not None:
        from stoker.planner import facility_file  # slow to import, as all that reads files

        facility = facility_file.parse(documents.unpacked(record.document_zlib), "facility")
        racks.update({name: facility.nodes[name].rack for name in racks if name in facility.nodes})
    found = sorted(name for name, its in racks.items() if its == rack)
    if not found:
        known = ", ".join(sorted({its for its in racks.values() if its})) or "none"
        raise NotFound(f"no node that is there stands in rack {rack!r}; racks of nodes: {known}")
    return found


@drain.command("replica", epilog="Example: stoker drain replica tiny-1")
def drain_replica(
    name: Annotated[str, typer.Argument(help="The replica.")],
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Let a replica finish its requests and stop; it is replaced where the count demands."""
    endpoints = Addresses.find(registry).require_registries()
    out = Output(output)

    async def work() -> None:
        async with Registries(endpoints, secured(registry)) as registries:
            await registries.client.drain_replica(name)

    run(work())
    out.result({"replica": name, "draining": True}, f"{name}: draining; follow with `stoker status`")


def logs(
    replica: Annotated[str, typer.Argument(help="The replica.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written later.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=10_000, help="Lines from the end.")] = 100,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the last lines of a replica's engine log."""
    endpoints = Addresses.find(registry).require_registries()
    out = Output(output)
    if follow and out.is_json:
        raise InvalidRequest.field("--follow", "cannot be combined with -o json: a JSON document must end")

    async def work() -> None:
        async with Registries(endpoints, secured(registry)) as registries:
            fleet = await registries.fleet()
        found = next((r for r in fleet.records.replicas if r.replica_id == replica), None)
        if found is None:
            known = ", ".join(sorted(r.replica_id for r in fleet.records.replicas)) or "none"
            raise NotFound(f"replica {replica!r} does not exist; known: {known}")
        if not found.agent_endpoint:
            raise NotFound(f"replica {replica!r} is on no node yet, so it has no log")
        gathered: list[str] = []
        async for line in tail(found.agent_endpoint, replica, lines, follow=follow, tls=secured(registry)):
            if out.is_json:
                gathered.append(line)
            else:
                typer.echo(line)
        if out.is_json:
            out.result({"replica": replica, "lines": gathered})

    run(work())


async def tail(
    endpoint: str, replica: str, lines: int, *, follow: bool, tls: Tls | None = None
) -> AsyncIterator[str]:
    """Yield log lines from the agent at `endpoint`."""
    async with rpc.channel(endpoint, tls) as channel:
        request = node_pb2.TailLogRequest(replica_id=replica, lines=lines, follow=follow)
        call = node_pb2_grpc.NodeServiceStub(channel).TailLog(request, timeout=None if follow else 10.0)
        try:
            async for answer in call:
                for line in answer.lines:
                    yield line
        except grpc.RpcError as failure:
            raise explained(endpoint, failure) from failure
        except asyncio.CancelledError:
            call.cancel()
            raise
