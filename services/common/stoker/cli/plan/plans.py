"""Plans: made from a facility and deployments, written as JSON, and read again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.cli import deployment_file
from stoker.common import yaml_file
from stoker.common.errors import InvalidRequest
from stoker.planner import facility_file
from stoker.planner.core import placement, siting
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.placement import Goal, Member, Pair, Placed, Placement, PlacementProblem, Score
from stoker.planner.core.placement.ground import Ground, ground
from stoker.planner.core.units import BytesPerSecond
from stoker.planner.records import deployment_of

_MAX_BYTES = 64 << 20

_UNITS = {
    Goal.OVERSUBSCRIBED: ("GB/s", 1e9),
    Goal.ADJACENCY: ("GB/s", 1e9),
    Goal.LOCALITY: ("roots", 1.0),
    Goal.RAILS: ("GPUs", 1.0),
    Goal.STRANDED: ("kW", 1e3),
    Goal.COST: ("an hour", 1.0),
}
"""Of each goal the unit in which it is told, and how many of its own that is; the others count replicas."""


@dataclass(frozen=True)
class Plan:
    """A problem and its answer. `seconds` is how long it took to find."""

    problem: PlacementProblem
    surface: Ground
    placement: Placement
    seconds: float

    @property
    def facility(self) -> Facility:
        """Where it is placed."""
        return self.problem.facility

    @property
    def gpus(self) -> int:
        """GPUs of all nodes that are not lost."""
        return sum(len(node.gpus) for node in self.facility.nodes.values() if node.name not in self.problem.lost)

    @property
    def gpus_used(self) -> int:
        """Those that replicas have."""
        return sum(len(member.gpus) for each in self.placement.placed for member in each.members)


def problem_of(facility: Path, deployments: Path) -> tuple[PlacementProblem, Ground]:
    """What two files ask for. Raises StokerError (BAD_FILE) with every line at fault."""
    given, specs = facility_file.read(facility), deployment_file.read_all(deployments)
    if not given.nodes:
        raise InvalidRequest.field(
            "FACILITY",
            f"{facility} lists no nodes to place on; name them under their racks, "
            'as in `nodes: {"n[1-4]": dgx-h100}` '
            "(`stoker plan capacity` says how many fit)",
        )
    surface = ground(given)
    counts = {spec.name: spec.replicas for spec in specs}
    spread = siting.default_spread(surface)
    needs = tuple(siting.need_of(deployment_of(spec), counts, spread) for spec in specs)
    slots = {node.name: 1 for node in given.nodes.values() if not node.gpus}
    return PlacementProblem(given, needs, slots=slots), surface


def sized(problem: PlacementProblem, size: str) -> PlacementProblem:
    """The problem with a deployment as large as a sizing says: NAME=FILE, the file as `stoker plan size -o json`
    writes it. Where prefill and decode are apart, NAME-prefill and NAME-decode are what it sizes.

    Raises InvalidRequest and StokerError (BAD_FILE).
    """
    name, _, file = size.partition("=")
    if not name or not file:
        raise InvalidRequest.field("--size", f"{size!r} is not NAME=FILE")
    try:
        best = json.loads(yaml_file.text(Path(file), _MAX_BYTES))["best"]
        answers = {_pool_name(name, pool): _pool(name, pool, best) for pool in best["pools"]}
    except (ValueError, TypeError, KeyError, RecursionError, ZeroDivisionError) as error:
        told = f"{file} has no sizing with a plan; write one with `stoker plan size … -o json > {file}`"
        raise yaml_file.bad(told) from error
    known = {need.deployment for need in problem.needs}
    for missing in sorted(answers.keys() - known):
        raise InvalidRequest.field("--size", f"{missing!r} is none of the deployments: {', '.join(sorted(known))}")
    needs = (replace(need, **answers.get(need.deployment, {})) for need in problem.needs)
    return replace(problem, needs=tuple(needs))


def _pool_name(name: str, pool: Mapping[str, Any]) -> str:
    return name if pool["role"] == "both" else f"{name}-{_text(pool['role'])}"


def _pool(name: str, pool: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """What a pool says of its deployment, as settings of a need."""
    nodes = max(1, _index(pool["nodes_per_replica"]))
    settings: dict[str, Any] = {
        "replicas": _index(pool["replicas"]),
        "members": nodes,
        "gpus": _index(pool["gpus_per_replica"]) // nodes,
        "tensor_parallel": max(1, _index(pool["tp"])),
        "gpu_types": frozenset({_text(pool["gpu"])}),
        "peer_rate": BytesPerSecond(_index(pool["peer_bytes_per_s"])),
    }
    if pool["role"] == "prefill":
        settings["pair"] = Pair(f"{name}-decode", BytesPerSecond(_index(best["kv_transfer_bytes_per_s"])))
    return settings


def on(problem: PlacementProblem, facility: Facility) -> tuple[PlacementProblem, Ground]:
    """The same problem on another facility."""
    return replace(problem, facility=facility), ground(facility)


def made(problem: PlacementProblem, surface: Ground, search_s: float) -> Plan:
    """The best placement that is found in time; at once where there is none."""
    began = time.monotonic()
    if search_s > 0:
        answer = placement.place(problem, time_limit_s=search_s, ground=surface)
    else:
        answer = placement.greedy(problem, ground=surface)
    return Plan(problem, surface, answer, time.monotonic() - began)


# --- as JSON ---


def value(plan: Plan) -> dict[str, Any]:
    """A plan as `read` takes it; docs/capacity.md has the keys."""
    answer, facility = plan.placement, plan.facility
    return {
        "facility": facility.name,
        "deployments": len(plan.problem.needs),
        "replicas": sum(need.replicas for need in plan.problem.needs),
        "replicas_placed": len(answer.placed),
        "gpus": plan.gpus,
        "gpus_used": plan.gpus_used,
        "feasible": answer.feasible,
        "proven": answer.proven,
        "seconds": round(plan.seconds, 3),
        "placed": [
            {
                "replica": each.replica,
                "deployment": each.deployment,
                "moved": each.replica in answer.moved,
                "members": members_value(each.members, facility),
            }
            for each in answer.placed
        ],
        "unplaced": [
            {
                "deployment": each.deployment,
                "replicas": each.replicas,
                "why": each.words,
                "limits": [conflict.limit for conflict in each.conflicts],
                "remedy": each.remedy,
            }
            for each in answer.unplaced
        ],
        "scores": scores_value(answer.scores),
    }


def members_value(members: Iterable[Member], facility: Facility | None = None) -> list[dict[str, Any]]:
    """Nodes and GPUs, in order of rank, with their racks where these are known."""
    known = facility.nodes if facility is not None else {}
    return [
        {
            "node": member.node,
            "rack": known[member.node].rack if member.node in known else None,
            "gpus": list(member.gpus),
        }
        for member in members
    ]


def scores_value(scores: Iterable[Score]) -> list[dict[str, Any]]:
    """Goal by goal, in watts, bytes per second and counts."""
    return [
        {"goal": score.goal.value, "value": score.value, "bound": score.bound, "proven": score.proven}
        for score in scores
    ]


def read(path: Path) -> tuple[Placed, ...]:
    """The replicas of a plan that `stoker plan place -o json` wrote. Raises StokerError (BAD_FILE)."""
    try:
        whole = json.loads(yaml_file.text(path, _MAX_BYTES))
        return tuple(_placed(each) for each in whole["placed"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise yaml_file.bad(f"{path} is no plan; write one with `stoker plan place … -o json > {path}`") from error


def _placed(said: Mapping[str, Any]) -> Placed:
    members = tuple(
        Member(_text(each["node"]), tuple(_index(gpu) for gpu in each["gpus"])) for each in said["members"]
    )
    return Placed(_text(said["replica"]), _text(said["deployment"]), members)


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError(said)
    return said


def _index(said: object) -> int:
    if not isinstance(said, int) or isinstance(said, bool) or said < 0:
        raise TypeError(said)
    return said


# --- in words ---


def where(members: Sequence[Member]) -> str:
    """Nodes and GPUs in a table's cell: "n1[0-3] n2[0-3]"."""
    return " ".join(f"{member.node}[{_ranges(member.gpus)}]" if member.gpus else member.node for member in members)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ranges where they follow each other, in their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def told(score: Score, figure: float | None = None) -> str:
    """A goal's value, or another figure of it, with its unit."""
    unit, scale = _UNITS.get(score.goal, ("replicas", 1.0))
    return f"{(score.value if figure is None else figure) / scale:,.4g} {unit}"
