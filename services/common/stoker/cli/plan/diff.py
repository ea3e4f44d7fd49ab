"""`stoker plan diff`: what leads from one plan to another, or from what runs to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from stoker.cli.addresses import Addresses, RegistryOption, secured
from stoker.cli.fleet import Fleet, Registries
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, counted, or_dash

if TYPE_CHECKING:
    from stoker.planner.core.changes import Change, Changes
    from stoker.planner.core.placement import Placed


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Example: stoker plan diff before.json after.json; against what runs: stoker plan diff plan.json"
    )(diff)


def diff(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan as `place -o json` writes it.", show_default=False)
    ],
    after: Annotated[
        Path | None,
        typer.Argument(metavar="[AFTER]", help="The plan to come; without it PLAN is.", show_default=False),
    ] = None,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show which replicas would move, start and stop, and the tokens in KV caches that would be lost with them.

    With one plan the fleet as it runs is what is changed; with two plans nothing is asked.
    """
    from stoker.cli.plan import plans
    from stoker.planner.core.changes import changes

    out = Output(output)
    if after is not None:
        found = changes(plans.read(plan), plans.read(after))
    else:
        wanted = plans.read(plan)
        running, warm = run(_running(registry))
        found = changes(running, wanted, warm)
    out.result(_value(found), *_shown(found))


async def _running(registry: str) -> tuple[Sequence[Placed], Mapping[str, float]]:
    """What stands in the fleet, and what each replica holds in its cache, in tokens, as far as engines tell."""
    async with Registries(Addresses.find(registry=registry).require_registries(), secured(registry)) as registries:
        fleet = await registries.fleet()
    return standing(fleet), warm_tokens(fleet)


def standing(fleet: Fleet) -> Sequence[Placed]:
    """The replicas of a fleet that are not on their way out."""
    from stoker.planner.core.placement import Member, Placed
    from stoker.planner.core.values import Wanted
    from stoker.planner.records import assignment_of

    found = [assignment_of(record) for record in fleet.records.assignments]
    return [
        Placed(each.replica, each.deployment, tuple(Member(member.node, member.gpus) for member in each.members))
        for each in found
        if each.wanted is Wanted.RUN
    ]


def warm_tokens(fleet: Fleet) -> Mapping[str, float]:
    """What each replica holds that others would have to compute anew: its KV cache, times the share of prompt tokens
    that it found there."""
    engines = {replica.replica_id: replica.engine for replica in fleet.records.replicas}
    found = {}
    for name, load in fleet.loads.items():
        engine = engines.get(name)
        if engine is not None and engine.total_blocks and load.cache_query_tokens:
            share = min(1.0, load.cache_hit_tokens / load.cache_query_tokens)
            found[name] = share * engine.total_blocks * engine.block_size
    return found


def _value(found: Changes) -> dict[str, Any]:
    from stoker.planner.core.changes import Kind

    return {
        "stay": found.stay,
        "move": found.of(Kind.MOVE),
        "start": found.of(Kind.START),
        "stop": found.of(Kind.STOP),
        "warm_tokens_lost": found.warm_tokens,
        "changes": [_change(change) for change in found.changes],
    }


def _change(change: Change) -> dict[str, Any]:
    from stoker.cli.plan import plans

    return {
        "kind": change.kind.value,
        "replica": change.replica,
        "deployment": change.deployment,
        "from": None if change.here is None else plans.members_value(change.here),
        "to": None if change.there is None else plans.members_value(change.there),
        "warm_tokens": change.warm_tokens,
    }


def _shown(found: Changes) -> list[RenderableType]:
    from stoker.cli.plan import plans
    from stoker.planner.core.changes import Kind

    counts = ", ".join(f"{found.of(kind):,} {kind.value}" for kind in Kind)
    head = f"{counted(found.stay, 'replica')} stay where they are; {counts}"
    if not found.changes:
        return [head]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "replica", "from", "to", "warm tokens"):
        table.add_column(column, overflow="fold", justify="right" if column == "warm tokens" else "left")
    for change in found.changes:
        table.add_row(
            change.kind.value,
            change.replica,
            or_dash(None if change.here is None else plans.where(change.here)),
            or_dash(None if change.there is None else plans.where(change.there)),
            or_dash(change.warm_tokens, "{:,.0f}"),
        )
    lost = or_dash(found.warm_tokens, "{:,.0f}")
    return [head, table, f"tokens in KV caches that others must compute anew: {lost}"]
