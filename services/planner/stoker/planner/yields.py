"""Tokens that GPUs of each type generate for a load, as sizing finds: what a facility's GPUs would be worth."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.planner.core.facility.values import Facility
from stoker.planner.core.sizing.architecture import Model
from stoker.planner.core.sizing.search import Sizing
from stoker.planner.core.sizing.workload import Slo, Workload
from stoker.planner.machines import machine_of


def yields(
    facility: Facility, node_types: Iterable[str], model: Model, workload: Workload, slo: Slo
) -> dict[str, float]:
    """Tokens per second of one GPU within the SLO, by GPU type; those that cannot keep it are left out.

    The rate is that of the best plan for `workload`: with many replicas of it a GPU is as full as the SLO lets it be.
    """
    found: dict[str, float] = {}
    for name in node_types:
        kind = facility.node_types[name]
        if not kind.gpu or kind.gpu in found:
            continue
        best = Sizing(model, (machine_of(facility, name),), workload, slo).answer().best
        if best is not None:
            found[kind.gpu] = workload.tokens_per_s / best.gpus
    return found
