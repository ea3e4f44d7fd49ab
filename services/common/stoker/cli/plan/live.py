"""`stoker plan apply | show | where | what-if | defrag`: the facility and the placements of a fleet that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import grpc
import typer
from rich.table import Table

from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.cli.addresses import Addresses, PlannerOption, RegistryOption, secured
from stoker.cli.fleet import Registries, explained
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, Verbatim, counted, or_dash
from stoker.common import rpc
from stoker.common.errors import Code, DeadlineExceeded, InvalidRequest, StokerError
from stoker.common.tls import Tls
from stoker.registry.core import documents

if TYPE_CHECKING:
    Stub = planner_pb2_grpc.PlannerServiceAsyncStub

R = TypeVar("R")

_CALL_S = 30.0
_POLL_S = 0.5
_LIMITS = 10
"""Limits that are shown to people; the tightest."""

TimeOption = Annotated[float, typer.Option("--time", min=0, max=3_600, help="Time to search, in seconds.")]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(epilog="Example: stoker plan apply facility.yaml")(apply)
    app.command(epilog="Example: stoker plan show -o json | jq .violations")(show)
    app.command("what-if", epilog="Example: stoker plan what-if --without-rack r7 --replicas chat=12")(what_if)
    app.command(epilog="Example: stoker plan where chat-3")(where)
    app.command(epilog="Example: stoker plan defrag --apply")(defrag)


def apply(
    facility: Annotated[Path, typer.Argument(metavar="FACILITY", help="Facility file; see examples/facilities/.")],
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite whatever is there, also what someone else has just written.")
    ] = False,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Have the fleet planned for this facility: what is placed from now on obeys it. Nothing that runs is stopped.

    What runs and would not be placed so is told, where a planner is known.
    """
    from stoker.planner import facility_file  # slow to import, as all that reads files

    text = facility_file.whole(facility)
    addresses, out = Addresses.find(registry, planner=planner), Output(output)
    endpoints, tls = addresses.require_registries(), secured(registry)

    async def work() -> tuple[records_pb2.Facility, list[planner_pb2.Violation]]:
        async with Registries(endpoints, tls) as registries:
            there = await registries.facility()
            seen = None if force else (there.revision if there is not None else 0)
            against = await _against(text, addresses.planners, tls)
            return await registries.client.put_facility(text, expected_revision=seen), against

    written, against = run(work())
    value = {
        "revision": written.revision,
        "bytes": written.document_bytes,
        "sha256": written.sha256,
        "violations": [_violation_json(each) for each in against],
    }
    for each in against:
        out.note(f"{each.limit}: {each.words}")
    out.result(
        value, f"{facility} is the facility, revision {written.revision}; `stoker plan show` tells what it does"
    )


async def _against(text: str, planners: Sequence[str], tls: Tls | None) -> list[planner_pb2.Violation]:
    """What of that which runs a facility would not allow; nothing where no planner can say."""
    if not planners:
        return []
    request = planner_pb2.ValidateRequest(facility=text)
    try:
        return list((await _ask(planners, tls, lambda stub: stub.Validate(request, timeout=_CALL_S))).violations)
    except StokerError:
        return []


def show(
    document: Annotated[
        bool, typer.Option("--document", help="The facility file itself, as it was applied.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the facility away: planners go by what agents report.")
    ] = False,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the facility that is planned for, and what of that which runs it would not allow."""
    addresses, out = Addresses.find(registry, planner=planner), Output(output)
    if document and remove:
        raise InvalidRequest.field("--remove", "cannot be combined with --document: give one of them")

    async def work() -> tuple[records_pb2.Facility | None, planner_pb2.GetPlannerStatusResponse | None]:
        async with Registries(addresses.require_registries(), secured(registry)) as registries:
            there = await registries.facility()
            if remove and there is not None:
                await registries.client.remove_facility(expected_revision=there.revision)
            asked = None if document or remove else await _leader(addresses.planners, secured(registry))
            return there, asked

    there, status = run(work())
    if remove:
        out.result({"removed": there is not None}, "no facility is applied; planners go by what agents report")
        return
    text = documents.unpacked(there.document_zlib) if there is not None else ""
    if document:
        out.result({"document": text}, Verbatim(text.rstrip("\n")))
        return
    out.result(*_shown(there, status))


def what_if(
    facility: Annotated[Path | None, typer.Option("--facility", help="Another facility file.")] = None,
    without_node: Annotated[list[str] | None, typer.Option("--without-node", help="A node that is lost.")] = None,
    without_rack: Annotated[list[str] | None, typer.Option("--without-rack", help="A rack that is lost.")] = None,
    replicas: Annotated[
        list[str] | None, typer.Option("--replicas", help="NAME=COUNT: another count of a deployment.")
    ] = None,
    search_s: TimeOption = 0.0,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what would be placed, and what not, if the fleet were otherwise. Nothing is changed."""
    request = planner_pb2.WhatIfRequest(
        without_nodes=without_node or [],
        without_racks=without_rack or [],
        replicas=dict(map(_count, replicas or [])),
        time_limit_s=search_s,
    )
    if facility is not None:
        from stoker.planner import facility_file

        request.facility = facility_file.whole(facility)
    targets, tls = Addresses.find(registry, planner=planner).require_planners(), secured(planner)
    answer = run(_ask(targets, tls, lambda stub: stub.WhatIf(request, timeout=_CALL_S + search_s)))
    value: dict[str, Any] = {
        "placed": [_placed_json(each) for each in answer.placed],
        "unplaced": [_unplaced_json(each) for each in answer.unplaced],
        "unplaced_now": [_unplaced_json(each) for each in answer.unplaced_now],
        "scores": _scores_json(answer.scores_now, answer.scores),
    }
    lines = [f"{e['replicas']} of {e['deployment']} would have no place: {e['reason']}" for e in value["unplaced"]]
    moved = _table("would be placed", "replica", "where")
    for each in value["placed"]:
        moved.add_row(each["replica_id"], each["where"])
    scores = _score_table(value["scores"])
    Output(output).result(value, *([moved] if value["placed"] else []), scores, *(lines or ["All has a place."]))


def where(
    name: Annotated[str, typer.Argument(help="A replica, or a deployment.")],
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show where a replica runs, how full the feeds above it are, and why a deployment is short of replicas."""
    targets, tls = Addresses.find(registry, planner=planner).require_planners(), secured(planner)
    request = planner_pb2.ExplainRequest(name=name)
    answer = run(_ask(targets, tls, lambda stub: stub.Explain(request, timeout=_CALL_S)))
    value = {
        "words": list(answer.words),
        "placed": [_placed_json(each) for each in answer.placed],
        "limits": [
            {"limit": each.limit, "used_w": each.used_w, "capacity_w": each.capacity_w} for each in answer.limits
        ],
    }
    limits = _table("draw at the most", "limit", "kW", "of kW")
    for each in answer.limits[:_LIMITS]:
        limits.add_row(each.limit, f"{each.used_w / 1e3:,.4g}", f"{each.capacity_w / 1e3:,.4g}")
    Output(output).result(value, *answer.words, *([limits] if answer.limits else []))


def defrag(
    make: Annotated[
        bool, typer.Option("--apply", help="Make the moves, one after the other, each once its successor serves.")
    ] = False,
    most: Annotated[int, typer.Option("--most", min=1, max=1_000, help="Moves at most.")] = 20,
    search_s: TimeOption = 10.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Longest wait for one move, in seconds.")
    ] = 900.0,
    registry: RegistryOption = "",
    planner: PlannerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Propose moves that leave the fleet better placed, with what each costs in warm cache; make them if asked."""
    addresses, out = Addresses.find(registry, planner=planner), Output(output)
    targets, tls = addresses.require_planners(), secured(planner)
    request = planner_pb2.ProposeMovesRequest(time_limit_s=search_s, most=most)
    with out.progress() as progress:
        progress.say("searching for moves")
        answer = run(_ask(targets, tls, lambda stub: stub.ProposeMoves(request, timeout=_CALL_S + search_s)))
    value: dict[str, Any] = {
        "moves": [_move_json(move) for move in answer.moves],
        "placed_more": answer.placed_more,
        "scores": _scores_json(answer.scores_now, answer.scores),
        "applied": 0,
    }
    if make and answer.moves:
        endpoints = addresses.require_registries()
        with out.progress() as progress:
            value["applied"] = run(_make(answer.moves, targets, endpoints, tls, timeout, progress.say))
    moves = _table("moves", "replica", "from", "to", "warm tokens")
    for each in value["moves"]:
        moves.add_row(each["replica_id"], each["from"], each["to"], or_dash(each["warm_tokens"], "{:,.0f}"))
    told = "nothing is gained by moving" if not answer.moves else counted(len(answer.moves), "move")
    done = f"; {value['applied']} made" if make else "; make them with --apply" if answer.moves else ""
    out.result(value, *([moves, _score_table(value["scores"])] if answer.moves else []), told + done)


async def _make(
    moves: Sequence[planner_pb2.Move],
    planners: Sequence[str],
    registries: Sequence[str],
    tls: Tls | None,
    timeout_s: float,
    say: Callable[[str], None],
) -> int:
    """Makes the moves one by one; returns how many. Stops at the first that cannot be made, which it raises."""
    async with Registries(registries, tls) as fleets:
        for number, move in enumerate(moves):
            say(f"move {number + 1} of {len(moves)}: {move.replica_id}")
            request = planner_pb2.MoveReplicaRequest(replica_id=move.replica_id, members=move.to_members)
            await _move(planners, tls, request)
            deadline = time.monotonic() + timeout_s
            while any(each.replica_id == move.replica_id for each in (await fleets.fleet()).records.assignments):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{move.replica_id} has not left within {timeout_s:g} s; {number} moves are made, and this "
                        "one goes on: see `stoker status`"
                    )
                await asyncio.sleep(_POLL_S)
    return len(moves)


async def _move(planners: Sequence[str], tls: Tls | None, request: planner_pb2.MoveReplicaRequest) -> None:
    await _ask(planners, tls, lambda stub: stub.MoveReplica(request, timeout=2 * _CALL_S))


async def _leader(planners: Sequence[str], tls: Tls | None) -> planner_pb2.GetPlannerStatusResponse | None:
    """The status of the planner that leads, if it is one of `planners`."""
    for target in planners:
        try:
            status = await _ask(
                [target], tls, lambda stub: stub.GetPlannerStatus(planner_pb2.GetPlannerStatusRequest(), timeout=5.0)
            )
        except StokerError:
            continue
        if status.leading:
            return status
    return None


async def _ask(targets: Sequence[str], tls: Tls | None, call: Callable[[Stub], Awaitable[R]]) -> R:
    """The answer of the first planner that gives one; a standby's word that it does not lead is passed over."""
    failure: StokerError | None = None
    for target in targets:
        async with rpc.channel(target, tls) as channel:
            stub: Stub = planner_pb2_grpc.PlannerServiceStub(channel)
            try:
                return await call(stub)
            except grpc.RpcError as error:
                failure = explained(target, error)
        elsewhere = failure.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) or failure.reason in (
            "NOT_LEADER",
            "PLANNER_BUSY",
        )
        if not elsewhere:
            break
    assert failure is not None  # noqa: S101 - there is at least one
    raise failure


def _shown(
    there: records_pb2.Facility | None, status: planner_pb2.GetPlannerStatusResponse | None
) -> tuple[dict[str, Any], Any]:
    value: dict[str, Any] = {
        "applied": there is not None,
        "revision": there.revision if there is not None else 0,
        "bytes": there.document_bytes if there is not None else 0,
        "planned_revision": status.facility_revision if status is not None else None,
        "problem": status.facility_problem if status is not None else None,
        "violations": [_violation_json(each) for each in (status.violations if status is not None else ())],
    }
    lines = [
        f"facility of revision {there.revision}, {there.document_bytes:,} bytes"
        if there is not None
        else "no facility is applied; planners go by what agents report"
    ]
    if status is None:
        lines.append("no leading planner is known here: what no longer holds is unknown")
    elif status.facility_problem:
        lines.append(f"not planned for: {status.facility_problem}")
    lines += [f"{v['limit']}: {v['words']}" for v in value["violations"]]
    return value, "\n".join(lines)


def _violation_json(violation: planner_pb2.Violation) -> dict[str, Any]:
    return {
        "limit": violation.limit,
        "subject": violation.subject,
        "words": violation.words,
        "replicas": list(violation.replicas),
    }


def _count(text: str) -> tuple[str, int]:
    name, equals, count = text.partition("=")
    if not (equals and name and count.isascii() and count.isdigit() and len(count) <= 6):
        raise InvalidRequest.field("--replicas", f"{text!r} must be NAME=COUNT, for example chat=12")
    return name, int(count)


def _where(members: Sequence[records_pb2.GangMember]) -> str:
    return " ".join(f"{m.node_id}{list(m.gpu_indices)}" if m.gpu_indices else m.node_id for m in members)


def _placed_json(placed: planner_pb2.PlacedReplica) -> dict[str, Any]:
    return {
        "replica_id": placed.replica_id,
        "deployment": placed.deployment,
        "where": _where(placed.members),
        "members": [{"node": m.node_id, "gpus": list(m.gpu_indices)} for m in placed.members],
    }


def _move_json(move: planner_pb2.Move) -> dict[str, Any]:
    return {
        "replica_id": move.replica_id,
        "from": _where(move.from_members),
        "to": _where(move.to_members),
        "warm_tokens": move.warm_tokens if move.HasField("warm_tokens") else None,
    }


def _unplaced_json(entry: planner_pb2.Unplaced) -> dict[str, Any]:
    return {"deployment": entry.deployment, "replicas": entry.replicas, "reason": entry.reason}


def _scores_json(
    before: Sequence[planner_pb2.GoalScore], after: Sequence[planner_pb2.GoalScore]
) -> list[dict[str, Any]]:
    return [{"goal": b.goal, "now": b.value, "then": a.value} for b, a in zip(before, after, strict=False)]


def _score_table(scores: Sequence[dict[str, Any]]) -> Table:
    table = _table("goals", "goal", "now", "then")
    for each in scores:
        if each["now"] or each["then"]:
            table.add_row(each["goal"], f"{each['now']:,.6g}", f"{each['then']:,.6g}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column)
    return table
