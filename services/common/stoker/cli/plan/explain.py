"""`stoker plan explain`: why a replica is where it is, what else was possible, and what binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from stoker.cli.output import Format, FormatOption, Output, counted
from stoker.cli.plan.place import DeploymentsArgument, FacilityArgument, SearchOption
from stoker.common.errors import InvalidRequest

if TYPE_CHECKING:
    from stoker.cli.plan.plans import Plan
    from stoker.planner.core.holding import Load
    from stoker.planner.core.otherwise import Alternatives
    from stoker.planner.core.placement import Placed, Score

_MOST_PLACES, _MOST_LIMITS = 3, 6


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Example: stoker plan explain chat-0 examples/facilities/two-rows.yaml examples/deployments.yaml"
    )(explain)


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A replica or a deployment.", show_default=False)],
    facility: FacilityArgument,
    deployments: DeploymentsArgument,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="The plan that placed it, from `place -o json`; else one is made.", show_default=False
        ),
    ] = None,
    search_s: SearchOption = 10.0,
    output: FormatOption = Format.TEXT,
) -> None:
    """Explain a replica's place, or those of a deployment: what limits it, where else it could be, at what price."""
    from stoker.cli.plan import plans

    out = Output(output)
    problem, surface = plans.problem_of(facility, deployments)
    if plan is not None:
        problem, search_s = replace(problem, standing=plans.read(plan)), 0.0
    found = plans.made(problem, surface, search_s)
    reasons = _Reasons.of(found, name)
    out.result(reasons.value(), *reasons.shown())


@dataclass(frozen=True)
class _Difference:
    """The first goal in which another place differs, whether for the better, and both figures."""

    goal: str
    better: bool
    words: str


@dataclass(frozen=True)
class _Reasons:
    """What is to be said of one replica (`replica`), or of a deployment as its next one (`replica` None)."""

    plan: Plan
    name: str
    replica: Placed | None
    mine: Sequence[Placed]
    limits: Sequence[Load]
    others: Alternatives
    """Of a replica its other places; of a deployment where one more would go."""

    @classmethod
    def of(cls, plan: Plan, name: str) -> _Reasons:
        """Raises InvalidRequest where nothing has that name."""
        from stoker.planner.core import holding, otherwise

        placed = plan.placement.placed
        replica = next((each for each in placed if each.replica == name), None)
        mine = [each for each in placed if name in (each.replica, each.deployment)]
        if replica is None and name not in {need.deployment for need in plan.problem.needs}:
            raise InvalidRequest.field(
                "NAME", f"{name!r} is neither a replica of this plan nor a deployment; `stoker plan place` lists them"
            )
        nodes = plan.facility.nodes
        racks = {nodes[m.node].rack for each in mine for m in each.members if m.node in nodes}
        state = holding.booked_all(replace(plan.problem, standing=placed), plan.surface)
        limits = [load for load in holding.loads(state) if load.racks & racks]
        if replica is not None:
            others = otherwise.alternatives(plan.problem, placed, replica, plan.surface, _MOST_PLACES)
        else:
            others = otherwise.one_more(plan.problem, placed, name, plan.surface)
        return cls(plan, name, replica, mine, limits[:_MOST_LIMITS], others)

    def value(self) -> dict[str, Any]:
        """As JSON; docs/capacity.md has the keys."""
        from stoker.cli.plan import plans

        return {
            "name": self.name,
            "kind": "replica" if self.replica is not None else "deployment",
            "why": self._why(),
            "placed": [
                {"replica": each.replica, "members": plans.members_value(each.members, self.plan.facility)}
                for each in self.mine
            ],
            "unplaced": [
                {"replicas": each.replicas, "why": each.words}
                for each in self.plan.placement.unplaced
                if each.deployment == self.name
            ],
            "scores": plans.scores_value(self.plan.placement.scores),
            "limits": [
                {
                    "limit": load.name,
                    "used_kw": round(load.used_w / 1e3, 4),
                    "capacity_kw": round(load.capacity_w / 1e3, 4),
                }
                for load in self.limits
            ],
            "alternatives": [
                {
                    "members": plans.members_value(place.members, self.plan.facility),
                    "differs_in": found.goal if (found := self._differs(place.scores)) else None,
                    "scores": plans.scores_value(place.scores),
                }
                for place in self.others.found
            ],
            "no_more_because": [conflict.words for conflict in self.others.conflicts],
        }

    def _why(self) -> str:
        """The place in one sentence, against the next best one."""
        if self.replica is None:
            return "one more has a place" if self.others.found else "one more has no place: " + self._conflicts()
        if not self.others.found:
            return "it can be nowhere else while the others stay: " + self._conflicts()
        found = self._differs(self.others.found[0].scores)
        if found is None:
            return "the next place is as good: the first by name was taken"
        if found.better:
            return f"another place is better now that all others stand ({found.words}); search longer (--search-s)"
        return f"the next place is worse: {found.words}"

    def _conflicts(self) -> str:
        return "; ".join(conflict.words for conflict in self.others.conflicts) or "no reason is known"

    def _differs(self, scores: Sequence[Score]) -> _Difference | None:
        """The first goal in which other scores differ from the plan's; None where they are alike."""
        from stoker.cli.plan import plans
        from stoker.planner.core import otherwise

        found = otherwise.first_difference(scores, self.plan.placement.scores)
        if found is None:
            return None
        there, here = found
        words = f"{there.goal.value} {plans.told(there)}, not {plans.told(here)}"
        return _Difference(there.goal.value, there.value < here.value, words)

    def shown(self) -> list[RenderableType]:
        """As tables."""
        from stoker.cli.plan import plans

        what = "" if self.replica is not None else f", {counted(len(self.mine), 'replica')}"
        parts: list[RenderableType] = [f"{self.name}{what}: {self._why()}", "", self._places()]
        for each in self.plan.placement.unplaced:
            if each.deployment == self.name:
                parts += ["", f"no place for {counted(each.replicas, 'replica')}: {each.words}"]
        if self.limits:
            table = _table("limits of these racks, the tightest first", "used", "has")
            for load in self.limits:
                table.add_row(load.name, f"{load.used_w / 1e3:,.4g} kW", f"{load.capacity_w / 1e3:,.4g} kW")
            parts += ["", table]
        if self.others.found:
            table = _table("where else" if self.replica else "where one more would be", "against this plan")
            for place in self.others.found:
                found = self._differs(place.scores)
                table.add_row(plans.where(place.members), found.words if found else "as good")
            parts += ["", table]
        if self.others.found and self.others.conflicts:
            parts += ["", f"nowhere beside these: {self._conflicts()}"]
        return parts

    def _places(self) -> Table:
        facility = self.plan.facility
        table = _table("replica", "node", "rack", "GPUs", "NVLink", "NUMA", "rails")
        for each in self.mine:
            for member in each.members:
                node = facility.nodes[member.node]
                known = {gpu.index: gpu for gpu in node.gpus}
                gpus = [known[index] for index in member.gpus if index in known]
                table.add_row(
                    each.replica,
                    member.node,
                    node.rack,
                    ",".join(map(str, member.gpus)),
                    _set(gpu.scale_up for gpu in gpus if gpu.scale_up),
                    _set(str(gpu.numa) for gpu in gpus if gpu.numa >= 0),
                    _set(str(gpu.rail) for gpu in gpus if gpu.rail >= 0),
                )
        return table


def _set(words: Any) -> str:
    return ",".join(dict.fromkeys(words)) or "–"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in ("used", "has") else "left", overflow="fold")
    return table
