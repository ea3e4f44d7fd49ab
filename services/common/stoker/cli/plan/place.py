"""`stoker plan place`: which GPUs each replica gets, and what would be if nodes failed or were added."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from stoker.cli import errors
from stoker.cli.output import Format, FormatOption, Output, counted, or_dash
from stoker.cli.plan import drawings
from stoker.cli.plan.drawings import HtmlOption, SvgOption, View, ViewOption
from stoker.common.errors import InvalidRequest

if TYPE_CHECKING:
    from stoker.cli.plan.plans import Plan
    from stoker.planner.core.placement import PlacementProblem, Score
    from stoker.planner.drawing.scene import Scene

_ADD = re.compile(r"(?P<type>[^@=\s]+)@(?P<rack>[^@=\s]+?)(?:=(?P<count>[1-9]\d{0,4}))?")
_LISTED = 60
"""With more replicas their places are told as JSON only."""
_QUIET_S = 2.0

FacilityArgument = Annotated[Path, typer.Argument(metavar="FACILITY", help="Facility file.", show_default=False)]
DeploymentsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DEPLOYMENTS", help="Deployments as for `stoker deploy`, parted by `---`.", show_default=False
    ),
]
SearchOption = Annotated[
    float,
    typer.Option("--search-s", min=0.0, max=600.0, help="Seconds to look for better places; 0: best fit alone."),
]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Example: stoker plan place examples/facilities/two-rows.yaml examples/deployments.yaml "
        "--html plan.html -o json > plan.json"
    )(place)


def place(
    facility: FacilityArgument,
    deployments: DeploymentsArgument,
    search_s: SearchOption = 10.0,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            help="NAME=FILE: a deployment as `plan size -o json` has sized it: count, GPUs, traffic. Repeatable.",
            show_default=False,
        ),
    ] = None,
    standing: Annotated[
        Path | None,
        typer.Option("--standing", help="A plan as written by -o json: what it placed stays.", show_default=False),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="What if this node, or this rack, were lost? Repeatable.", show_default=False),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", help="What if nodes were added? TYPE@RACK[=COUNT]. Repeatable.", show_default=False),
    ] = None,
    svg: SvgOption = None,
    html: HtmlOption = None,
    view: ViewOption = View.ALL,
    output: FormatOption = Format.TEXT,
) -> None:
    """Place deployments in a facility: the GPUs of each replica, what has no place and why, how good it is.

    Nothing is started. Exit status 1 where a replica has no place.
    """
    from stoker.cli.plan import plans

    out = Output(output)
    problem, surface = plans.problem_of(facility, deployments)
    for each in size or []:
        problem = plans.sized(problem, each)
    if standing is not None:
        problem = replace(problem, standing=plans.read(standing))
    with out.progress() as progress:
        if search_s > _QUIET_S and sys.stderr.isatty():
            wanted = sum(need.replicas for need in problem.needs)
            progress.say(f"placing {counted(wanted, 'replica')} on {counted(len(surface.facility.nodes), 'node')}")
        plan = plans.made(problem, surface, search_s)
        before = None
        if without or add:
            before, otherwise = plan, _otherwise(problem, plan, without or [], add or [])
            plan = plans.made(*otherwise, search_s)
    drawings.write(out, lambda: _scene(plan), svg, html, view=view, tables=_page_tables(plan))
    value = plans.value(plan)
    value["what_if"] = None if before is None else _what_if(before, plan, without or [], add or [])
    out.result(value, *_shown(plan, before))
    if not plan.placement.feasible:
        raise typer.Exit(errors.FAILED)


def _otherwise(
    problem: PlacementProblem, plan: Plan, without: Sequence[str], add: Sequence[str]
) -> tuple[PlacementProblem, Any]:
    """The problem after what might happen, with what was placed standing."""
    from stoker.cli.plan import plans
    from stoker.planner.core import otherwise

    facility = problem.facility
    for text in add:
        said = _ADD.fullmatch(text)
        if said is None:
            raise InvalidRequest.field("--add", f"{text!r} is not TYPE@RACK or TYPE@RACK=COUNT")
        _known("--add", said["type"], facility.node_types, "node type")
        _known("--add", said["rack"], facility.racks, "rack")
        count, room = int(said["count"] or 1), otherwise.room_for(facility, said["type"], said["rack"])
        if count > room:
            raise InvalidRequest.field(
                "--add", f"rack {said['rack']} has free units for {room:,} more {said['type']}, not {count:,}"
            )
        facility = otherwise.with_nodes(facility, said["type"], said["rack"], count)
    try:
        lost = otherwise.nodes_named(facility, without)
    except KeyError as error:
        raise InvalidRequest.field("--without", f"{error.args[0]!r} is neither a node nor a rack here") from error
    return plans.on(replace(problem, standing=plan.placement.placed, lost=lost), facility)


def _known(option: str, name: str, names: Any, what: str) -> None:
    if name not in names:
        raise InvalidRequest.field(option, f"{name!r} is no {what} here")


def _what_if(before: Plan, after: Plan, without: Sequence[str], add: Sequence[str]) -> dict[str, Any]:
    from stoker.cli.plan import plans

    here = {each.replica for each in after.placement.placed}
    return {
        "without": list(without),
        "added": list(add),
        "moved": sorted(after.placement.moved),
        "displaced": sorted({each.replica for each in before.placement.placed} - here),
        "scores_before": plans.scores_value(before.placement.scores),
    }


# --- shown ---


def _scene(plan: Plan) -> Scene:
    from stoker.planner.drawing.scene import Scene

    notes = (_headline(plan), *(f"{each.deployment}: {each.words}" for each in plan.placement.unplaced))
    closed = plan.problem.closed | plan.problem.lost
    return Scene.of_placement(plan.facility, plan.placement.placed, plan.problem.needs, notes, closed)


def _headline(plan: Plan) -> str:
    answer = plan.placement
    wanted = sum(need.replicas for need in plan.problem.needs)
    quality = "nothing better exists" if answer.proven else "better may exist"
    return (
        f"{len(answer.placed):,} of {counted(wanted, 'replica')} placed on {plan.gpus_used:,} of "
        f"{counted(plan.gpus, 'GPU')} "
        f"in {plan.seconds:.1f} s; {quality}"
    )


def _shown(plan: Plan, before: Plan | None) -> list[RenderableType]:
    from stoker.cli.plan import plans

    answer = plan.placement
    shown: list[RenderableType] = [f"{plan.facility.name}: {_headline(plan)}", _deployments(plan), "", _goals(plan)]
    if before is not None:
        lost = {each.replica for each in before.placement.placed} - {each.replica for each in answer.placed}
        shown += ["", f"what if: {_names(answer.moved)} moved, {_names(lost)} without a place"]
        changed = [(old, new) for old, new in zip(before.placement.scores, answer.scores, strict=True) if old != new]
        shown += [f"  {new.goal.value}: {plans.told(old)} → {plans.told(new)}" for old, new in changed]
    for each in answer.unplaced:
        shown += [
            "",
            f"[red]no place[/red] for {counted(each.replicas, 'replica')} of {each.deployment}: {each.words}",
        ]
    if len(answer.placed) <= _LISTED:
        table = _table("replica", "GPUs")
        for placed in answer.placed:
            table.add_row(placed.replica, plans.where(placed.members))
        shown += ["", table]
    else:
        shown += ["", f"where each of {len(answer.placed):,} replicas is: -o json, or --html"]
    return shown


def _names(names: Any) -> str:
    """A few names, or how many there are."""
    ordered = sorted(names)
    return ", ".join(ordered) if 0 < len(ordered) <= 5 else counted(len(ordered), "replica")


def _deployments(plan: Plan) -> Table:
    table = _table("deployment", "placed", "GPUs each", "racks", "most in one", right=("placed", "racks"))
    nodes = plan.facility.nodes
    for need in plan.problem.needs:
        mine = [each for each in plan.placement.placed if each.deployment == need.deployment]
        racks = Counter(
            rack for each in mine for rack in {nodes[m.node].rack for m in each.members if m.node in nodes}
        )
        size = f"{need.members} × {need.gpus}" if need.members > 1 else str(need.gpus)
        most = f"{max(racks.values(), default=0)} in {max(racks, key=lambda rack: racks[rack])}" if racks else None
        table.add_row(need.deployment, f"{len(mine)} of {need.replicas}", size, str(len(racks)), or_dash(most))
    return table


def _goals(plan: Plan) -> Table:
    table = _table("goal", "value", "no plan below", "", right=("value", "no plan below"))
    for score in plan.placement.scores:
        table.add_row(*_goal(score))
    return table


def _goal(score: Score) -> tuple[str, str, str, str]:
    from stoker.cli.plan import plans

    bound = None if score.bound is None else plans.told(score, score.bound)
    gap = "proven" if score.proven else or_dash(score.gap, "{:.1%} above it")
    return score.goal.value, plans.told(score), or_dash(bound), gap


def _page_tables(plan: Plan) -> list[drawings.Table]:
    from stoker.cli.plan import plans

    placed = [("replica", "deployment", "nodes and GPUs")]
    placed += [(each.replica, each.deployment, plans.where(each.members)) for each in plan.placement.placed]
    goals = [("goal", "value", "no plan below", ""), *(_goal(score) for score in plan.placement.scores)]
    return [("Goals", goals), ("Replicas", placed)]


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
