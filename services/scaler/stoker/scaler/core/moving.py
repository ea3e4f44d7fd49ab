"""Replicas that will be replaced although they serve: whose caches move next, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.scaler.core.victims import by_ordinal


@dataclass(frozen=True, slots=True)
class Runner:
    """A replica that is meant to run."""

    id: str
    ready: bool
    displaced: bool = False
    """Its node drains."""
    outdated: bool = False
    """It runs an earlier specification."""
    alike: bool = True
    """Prompts mean the same to it as to the specification's replicas: it serves the same model."""


@dataclass(frozen=True, slots=True)
class Move:
    """Replicas that leave next, and those that take over what they hold: ready ones and ones that are to be."""

    going: tuple[str, ...]
    heirs: tuple[str, ...]


def next_move(runners: Sequence[Runner], victims: Sequence[str] = ()) -> Move | None:
    """What moves next of one deployment; None where nothing does, or nobody is there to take it.

    In the order in which the planner lets them go: what drains goes together, what runs an earlier specification one
    by one, `victims` first, then the highest ordinal. What goes later is no heir: it would take along again what it
    was given.
    """
    able = [runner for runner in runners if runner.ready and runner.alike]
    going = [runner.id for runner in able if runner.displaced]
    renewed = sorted((r.id for r in able if r.outdated and not r.displaced), key=by_ordinal)
    chosen = frozenset(victims)
    named = [name for name in renewed if name in chosen]
    going += named or renewed[:1]
    heirs = [runner.id for runner in runners if not runner.displaced and not runner.outdated]
    return Move(tuple(sorted(going)), tuple(sorted(heirs))) if going and heirs else None
