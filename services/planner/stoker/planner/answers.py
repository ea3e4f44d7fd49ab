"""What operators ask a planner, answered: messages in, messages out, the core between them. All may take long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from stoker.api.common.v1 import common_pb2
from stoker.api.planner.v1 import planner_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import InvalidRequest, NotFound, StokerError
from stoker.planner import facility_file
from stoker.planner.computing import Task
from stoker.planner.core import envelope, holding, moving, placement, siting
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.holding import Violation
from stoker.planner.core.placement import Placed, Placement, PlacementProblem, Score
from stoker.planner.core.placement.ground import Ground, ground
from stoker.planner.core.values import Problem
from stoker.planner.records import deployment_of
from stoker.registry.core import documents, validation
from stoker.registry.core import placement as placement_policy
from stoker.registry.core.validation import Limits

_MOST_DEPLOYMENTS = 1_000
_MOST_REPLICAS = 100_000
_MOST_LIMITS = 100
_MOST_MISTAKES = 1_000
_MOST_VIOLATIONS = 1_000


def capacity(facility: Facility, request: planner_pb2.CapacityRequest, task: Task) -> planner_pb2.CapacityResponse:
    """How much a facility carries. Raises InvalidRequest where what it is to be filled with is unknown."""
    found = envelope.capacity(facility, request.fill, task.look)
    binding = found.binding
    return planner_pb2.CapacityResponse(
        racks=found.racks,
        nodes=found.nodes,
        gpus=found.gpus,
        nodes_per_rack=found.nodes_per_rack,
        u_used=found.u_used,
        power_w=found.power,
        binding=binding.kind.value if binding is not None else "",
        words=envelope.in_words(binding, found.fill) if binding is not None else "",
    )


def place(surface: Ground, request: planner_pb2.PlaceRequest, task: Task) -> planner_pb2.PlaceResponse:
    """A placement from nothing."""
    deployments = [deployment_of(spec) for spec in _checked(request.deployments)]
    counts = {spec.name: spec.replicas for spec in request.deployments}
    spread = siting.default_spread(surface)
    needs = tuple(siting.need_of(deployment, counts, spread) for deployment in deployments)
    slots = {node.name: 1 for node in surface.facility.nodes.values() if not node.gpus}
    began = time.monotonic()
    made = _placed(PlacementProblem(surface.facility, needs, slots=slots), surface, task, request.time_limit_s)
    return planner_pb2.PlaceResponse(
        placed=[_replica(each) for each in made.placed],
        unplaced=_unplaced(made),
        scores=_scores(made.scores),
        seconds=time.monotonic() - began,
    )


def read(text: str, task: Task) -> Ground:
    """A facility file as a ground. Raises StokerError naming each mistake."""
    documents.packed(text)
    return ground(facility_file.parse(text, "facility", task.look))


def ground_of(problem: Problem) -> Ground:
    """Where the fleet is placed."""
    return problem.ground or siting.ground_of(problem.nodes)


def what_if(problem: Problem, request: planner_pb2.WhatIfRequest, task: Task) -> planner_pb2.WhatIfResponse:
    """What would be placed, and what not, where the fleet were as `request` says."""
    here = ground_of(problem)
    surface = ground(_merged(read(request.facility, task).facility, problem)) if request.facility else here
    now = _asked(problem, here, {})
    before = placement.greedy(now, ground=here, look=task.look)
    racks = set(request.without_racks)
    for rack in sorted(racks - surface.facility.racks.keys()):
        raise InvalidRequest.field("without_racks", f"{rack!r} is no rack of the facility")
    lost = {*request.without_nodes, *(n.name for n in surface.facility.nodes.values() if n.rack in racks)}
    for node in sorted(set(request.without_nodes) - surface.facility.nodes.keys()):
        raise InvalidRequest.field("without_nodes", f"{node!r} is no node of the facility")
    more = [deployment_of(spec) for spec in _checked(request.deployments)]
    for name in sorted({each.name for each in more} & {each.name for each in problem.deployments}):
        raise InvalidRequest.field("deployments", f"{name!r} is there already; give another count in `replicas`")
    there = [node for node in problem.nodes if node.id not in lost]
    changed = replace(problem, deployments=[*problem.deployments, *more], nodes=there)
    _bounded(request.replicas)
    counts = {**dict(request.replicas), **{spec.name: spec.replicas for spec in request.deployments}}
    for name in sorted(counts.keys() - {d.name for d in changed.deployments}):
        raise InvalidRequest.field("replicas", f"{name!r} is no deployment")
    asked = replace(_asked(changed, surface, counts), lost=frozenset(lost))
    made = _placed(asked, surface, task, request.time_limit_s)
    stood = {each.replica: each.members for each in now.standing}
    return planner_pb2.WhatIfResponse(
        placed=[_replica(each) for each in made.placed if stood.get(each.replica) != each.members],
        unplaced=_unplaced(made),
        unplaced_now=_unplaced(before),
        scores=_scores(made.scores),
        scores_now=_scores(before.scores),
    )


def explain(problem: Problem, name: str, why: Mapping[str, str]) -> planner_pb2.ExplainResponse:
    """Where a replica, or each of a deployment's, is, what limits its racks, and what is short. Raises NotFound."""
    mine = [a for a in problem.assignments if name in (a.replica, a.deployment)]
    if not mine and name not in {d.name for d in problem.deployments}:
        raise NotFound(f"{name!r} is neither a replica nor a deployment; `stoker status` lists them")
    surface = ground_of(problem)
    state = holding.booked(problem, surface)
    nodes = surface.facility.nodes
    there = {member.node for assignment in mine for member in assignment.members if member.node in nodes}
    racks = {nodes[node].rack for node in there}
    limits = [load for load in holding.loads(state) if load.racks & racks]
    words = [
        f"{a.replica} is {'and '.join(_spot(m.node, m.gpus, surface) for m in a.members)}; it shall {a.wanted.value}."
        for a in sorted(mine, key=lambda a: a.replica)
    ]
    names = {name, *(a.replica for a in mine)}
    against = (v for v in holding.violations(problem, surface, state) if v.subject == name or names & set(v.replicas))
    words += [f"{violation.words}." for violation in against]
    words += [f"{told}." for told in holding.eased(state, mine[0].deployment if mine else name)]
    words += [f"{deployment}: {reason}" for deployment, reason in why.items() if name == deployment]
    return planner_pb2.ExplainResponse(
        words=words,
        placed=[
            planner_pb2.PlacedReplica(
                replica_id=a.replica,
                deployment=a.deployment,
                members=_members(a.members),
            )
            for a in mine
        ],
        limits=[
            planner_pb2.LimitLoad(limit=load.name, used_w=load.used_w, capacity_w=load.capacity_w)
            for load in limits[:_MOST_LIMITS]
        ],
    )


def validate(text: str, problem: Problem, task: Task) -> planner_pb2.ValidateResponse:
    """What is wrong with a facility file, and what of that which runs it would not allow."""
    try:
        facility = read(text, task).facility
    except StokerError as error:
        return planner_pb2.ValidateResponse(mistakes=error.message.splitlines()[:_MOST_MISTAKES])
    surface = ground(_merged(facility, problem))
    would = replace(
        problem,
        ground=surface,
        applied=True,
        unlisted=frozenset(node.id for node in problem.nodes if node.id not in facility.nodes),
    )
    return planner_pb2.ValidateResponse(
        sites=len(facility.sites),
        racks=len(facility.racks),
        nodes=len(facility.nodes),
        gpus=sum(len(node.gpus) for node in facility.nodes.values()),
        violations=violation_messages(holding.violations(would, surface)),
    )


def propose(problem: Problem, most: int, task: Task, warm: Mapping[str, float]) -> planner_pb2.ProposeMovesResponse:
    """Moves that would leave the fleet better placed; `warm` is what each replica holds in its cache, in tokens."""
    surface, counts = ground_of(problem), _desired(problem)
    proposal = moving.propose(
        problem,
        surface,
        counts=counts,
        time_limit_s=task.limit_s,
        most=most,
        clock=task.clock,
        look=task.look,
        stopping=task.stopping,
    )
    response = planner_pb2.ProposeMovesResponse(
        scores_now=_scores(proposal.before), scores=_scores(proposal.after), placed_more=proposal.placed_more
    )
    for move in proposal.moves:
        told = response.moves.add(replica_id=move.replica, from_members=_members(move.here))
        told.to_members.extend(_members(move.there))
        if move.replica in warm:
            told.warm_tokens = warm[move.replica]
    return response


def violation_messages(violations: Iterable[Violation]) -> list[planner_pb2.Violation]:
    """As they are told, which is the first thousand: an answer has to fit into a message."""
    return [
        planner_pb2.Violation(limit=v.limit, subject=v.subject, words=v.words, replicas=v.replicas)
        for v in islice(violations, _MOST_VIOLATIONS)
    ]


def _asked(problem: Problem, surface: Ground, counts: Mapping[str, int]) -> PlacementProblem:
    """The whole fleet as a placement's problem: as many of each deployment as are desired, or as `counts` says."""
    return siting.whole(problem, surface, {**_desired(problem), **counts})


def _merged(facility: Facility, problem: Problem) -> Facility:
    return siting.merged_with(facility, problem.nodes)


def _desired(problem: Problem) -> dict[str, int]:
    return {name: desired.replicas for name, desired in problem.desired.items()}


def _placed(asked: PlacementProblem, surface: Ground, task: Task, time_limit_s: float) -> Placement:
    if time_limit_s <= 0:
        return placement.greedy(asked, ground=surface, look=task.look)
    limit_s = min(time_limit_s, task.limit_s)
    return placement.place(
        asked,
        time_limit_s=limit_s,
        ground=surface,
        clock=task.clock,
        look=task.look,
        stopping=task.stopping,
    )


def _checked(specs: Sequence[common_pb2.DeploymentSpec]) -> Sequence[common_pb2.DeploymentSpec]:
    """Raises InvalidRequest where the registry would refuse one."""
    if len(specs) > _MOST_DEPLOYMENTS:
        raise InvalidRequest.field("deployments", f"{len(specs)} of them; at most {_MOST_DEPLOYMENTS}")
    for spec in specs:
        validation.require(validation.deployment(spec, Limits()))
        validation.require(placement_policy.policy("spec.placement", spec.placement, spec))
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise InvalidRequest.field("deployments", "names are there twice; give each once")
    replicas = sum(spec.replicas for spec in specs)
    if replicas > _MOST_REPLICAS:
        raise InvalidRequest.field("deployments", f"ask for {replicas:,} replicas; at most {_MOST_REPLICAS:,}")
    return specs


def _bounded(counts: Mapping[str, int]) -> None:
    """Raises InvalidRequest where there are more than a deployment, or all of a fleet, may have: each is sought."""
    most = Limits().replicas
    for name, count in counts.items():
        if count > most:
            raise InvalidRequest.field("replicas", f"{name!r}: {count:,} is too many; at most {most:,}")
    if sum(counts.values()) > _MOST_REPLICAS:
        raise InvalidRequest.field("replicas", f"are {sum(counts.values()):,} in all; at most {_MOST_REPLICAS:,}")


def _spot(node: str, gpus: Sequence[int], surface: Ground) -> str:
    known = surface.facility.nodes.get(node)
    rack = f" in rack {known.rack}" if known is not None else ""
    which = f" with GPUs {', '.join(map(str, gpus))}" if gpus else ""
    return f"on {node}{rack}{which}"


def _replica(placed: Placed) -> planner_pb2.PlacedReplica:
    return planner_pb2.PlacedReplica(
        replica_id=placed.replica, deployment=placed.deployment, members=_members(placed.members)
    )


def _members(members: Sequence[placement.Member]) -> list[records_pb2.GangMember]:
    return [
        records_pb2.GangMember(rank=rank, node_id=member.node, gpu_indices=member.gpus)
        for rank, member in enumerate(members)
    ]


def _unplaced(made: Placement) -> list[planner_pb2.Unplaced]:
    return [planner_pb2.Unplaced(deployment=e.deployment, replicas=e.replicas, reason=e.words) for e in made.unplaced]


def _scores(scores: Iterable[Score]) -> list[planner_pb2.GoalScore]:
    return [planner_pb2.GoalScore(goal=s.goal.value, value=s.value, bound=s.bound) for s in scores]
