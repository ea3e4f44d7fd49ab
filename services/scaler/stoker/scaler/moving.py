"""What others are to compute before a replica goes because its node drains or its specification is outdated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stoker.api.registry.v1 import records_pb2
from stoker.control.specs import spec_key
from stoker.registry.client import FleetView
from stoker.registry.core.scaling import MAX_WARMINGS
from stoker.scaler.core.moving import Move, Runner, next_move
from stoker.scaler.core.values import Standing
from stoker.scaler.observed import standing_of

_AGAIN_S = 30.0
"""What is likely to be asked for changes while a replacement starts: a plan is drawn up anew after this long."""


class Moving:
    """Which replicas move, as the records tell it, and which moves have been planned for. Times are monotonic."""

    def __init__(self, view: FleetView) -> None:
        self.movers: frozenset[str] = frozenset()
        """Replicas that the planner replaces, as of the last look."""
        self._view = view
        self._seen = -1
        self.moves: dict[str, Move] = {}
        """What moves next, by deployment."""
        self._planned: dict[str, tuple[Move, float]] = {}
        self._differs: dict[tuple[str, int, int], tuple[bool, bool]] = {}

    def look(self) -> None:
        """Take what has changed in the records."""
        if self._seen == self._view.revision:
            return
        self._seen = self._view.revision
        runners = self._runners()
        self.movers = frozenset(r.id for those in runners.values() for r in those if r.displaced or r.outdated)
        chosen = {name: desired.victims for name in runners if (desired := self._view.desired.get(name)) is not None}
        moves = ((name, next_move(those, chosen.get(name, ()))) for name, those in runners.items())
        self.moves = {name: move for name, move in moves if move is not None}
        for name in self._planned.keys() - self.moves.keys():
            del self._planned[name]

    def due(self, now: float) -> dict[str, Move]:
        """By deployment the moves that no plan was made for, or one too long ago."""
        return {name: move for name, move in self.moves.items() if self._is_due(name, move, now)}

    def planned(self, deployment: str, move: Move, now: float) -> None:
        """A plan was made for it."""
        self._planned[deployment] = move, now

    def _is_due(self, deployment: str, move: Move, now: float) -> bool:
        before, at = self._planned.get(deployment, (None, now))
        return before != move or now - at >= _AGAIN_S

    def _runners(self) -> dict[str, list[Runner]]:
        """Of each deployment in which any replica moves, those that are meant to run."""
        draining = {name for name, node in self._view.nodes.items() if node.draining}
        deployments = self._view.deployments
        mine: defaultdict[str, list[records_pb2.Replica]] = defaultdict(list)
        moving = set()
        for replica in self._view.replicas.values():
            deployment = deployments.get(replica.deployment)
            if deployment is None or replica.wanted != records_pb2.WANTED_RUN:
                continue
            mine[replica.deployment].append(replica)
            if replica.generation != deployment.generation or _on(replica, draining):
                moving.add(replica.deployment)
        for key in [key for key in self._differs if key[0] not in moving]:
            del self._differs[key]
        return {name: [self._runner(each, deployments[name], draining) for each in mine[name]] for name in moving}

    def _runner(self, replica: records_pb2.Replica, deployment: records_pb2.Deployment, draining: set[str]) -> Runner:
        outdated, alike = self._difference(replica, deployment)
        return Runner(
            replica.replica_id,
            ready=standing_of(replica) is Standing.READY,
            displaced=_on(replica, draining),
            outdated=outdated,
            alike=alike,
        )

    def _difference(self, replica: records_pb2.Replica, deployment: records_pb2.Deployment) -> tuple[bool, bool]:
        """Whether a replica runs another specification than its deployment's, and whether of the same model.

        A generation of a deployment is one specification; most changes of it concern no replica.
        """
        if replica.generation == deployment.generation:
            return False, True
        key = (replica.deployment, replica.generation, deployment.generation)
        if key not in self._differs:
            assignment = self._view.assignments.get(replica.replica_id)
            if assignment is None:
                return False, True
            spec, wanted = assignment.spec, deployment.spec
            self._differs[key] = spec_key(spec) != spec_key(wanted), spec.model == wanted.model
        return self._differs[key]


def _on(replica: records_pb2.Replica, nodes: set[str]) -> bool:
    return bool(nodes) and any(member.node_id in nodes for member in replica.members)


def moved(standing: records_pb2.Desired, move: Move, warmings: Sequence[records_pb2.Warming]) -> records_pb2.Desired:
    """A standing decision with what is to be computed before this move; all else of it stays."""
    record = records_pb2.Desired()
    record.CopyFrom(standing)
    others = [each for each in standing.warmings if each.from_replica not in move.going]
    del record.warmings[:]
    record.warmings.extend([*warmings, *others][:MAX_WARMINGS])
    return record
