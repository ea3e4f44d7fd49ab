"""A fleet in miniature for the planner's tests: what plans are drawn from, applied to, and checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stoker.planner import facility_file
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.holding import violations
from stoker.planner.core.loss import Presence, look
from stoker.planner.core.placement import Domain, Member, Need, Placed, PlacementProblem
from stoker.planner.core.placement.ground import Ground, ground
from stoker.planner.core.plan import plan
from stoker.planner.core.siting import ground_of, merged_with
from stoker.planner.core.units import Watts
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Limits,
    Node,
    Plan,
    Problem,
    Wanted,
    Warming,
    Wishes,
)
from tests.support.facilities import hall
from tests.support.placement_checker import faults


@dataclass
class World:
    """The records as they stand; `step` draws a plan, checks it and applies it."""

    limits: Limits = field(default_factory=Limits)
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    absent: dict[str, Node] = field(default_factory=dict)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    desired: dict[str, Desired] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    conditions: dict[str, Condition] = field(default_factory=dict)
    presence: Presence = field(default_factory=Presence)
    replacing: frozenset[str] = frozenset()
    retired: frozenset[str] = frozenset()
    moves: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    facility: Facility | None = None
    """As an operator wrote it; None: agents' reports alone."""

    def problem(self) -> Problem:
        assigned = {member.node for assignment in self.assignments.values() for member in assignment.members}
        self.presence = look(self.presence, self.nodes.keys(), assigned, self.now, self.limits)
        here, nodes = self.facility, tuple(self.nodes.values())
        listed = here.nodes if here is not None else self.nodes
        return Problem(
            ground=ground(merged_with(here, nodes)) if here is not None else ground_of(nodes),
            applied=here is not None,
            unlisted=frozenset(self.nodes.keys() - listed.keys()),
            moves=dict(self.moves),
            nodes=nodes,
            deployments=tuple(self.deployments.values()),
            desired=dict(self.desired),
            assignments=tuple(self.assignments.values()),
            conditions=dict(self.conditions),
            settling=self.presence.settling,
            lost=self.presence.lost,
            replacing=self.replacing,
            retired=self.retired,
        )

    def step(self) -> Plan:
        problem = self.problem()
        drawn = plan(problem, self.limits)
        check(problem, drawn, self.limits)
        for replica in drawn.deletes:
            del self.assignments[replica]
            self.conditions.pop(replica, None)
            self.retired -= {replica}
        self.moves = {replica: there for replica, there in self.moves.items() if not drawn.moves.get(replica)}
        for assignment in drawn.puts:
            self.assignments[assignment.replica] = replace(assignment, warmings=())
            self.conditions.setdefault(assignment.replica, Condition.NOT_READY)
        self.replacing = drawn.replacing
        running = {replica for replica, a in self.assignments.items() if a.wanted is Wanted.RUN}
        self.moves = {replica: there for replica, there in self.moves.items() if replica in running}
        return drawn

    def settle(self, rounds: int = 50) -> Plan:
        """Steps until a plan writes nothing, which must come soon; returns that plan."""
        for _ in range(rounds):
            drawn = self.step()
            if drawn.quiet:
                return drawn
        raise AssertionError(f"no rest after {rounds} rounds: {drawn}")

    def finish(self, rounds: int = 200) -> Plan:
        """Settles again and again, with agents that do all they are asked at once."""
        for _ in range(rounds):
            before = dict(self.assignments)
            drawn = self.settle()
            self.obey()
            if before == self.assignments and self.plan_is_quiet():
                return drawn
        raise AssertionError(f"not finished after {rounds} rounds: {self.assignments}")

    def plan_is_quiet(self) -> bool:
        return plan(self.problem(), self.limits).quiet

    def obey(self) -> None:
        for replica, assignment in self.assignments.items():
            here = all(member.node in self.nodes for member in assignment.members)
            running = Condition.READY if here else Condition.NOT_READY
            self.conditions[replica] = Condition.GONE if assignment.wanted is Wanted.DRAIN else running
        self.retired = frozenset(name for name, a in self.assignments.items() if a.wanted is Wanted.RETIRE)

    def lose(self, node: str) -> None:
        """The node and all it reported go."""
        self.absent[node] = self.nodes.pop(node)
        for replica, assignment in self.assignments.items():
            if any(member.node == node for member in assignment.members):
                self.conditions[replica] = Condition.NOT_READY

    def running(self, deployment: str) -> list[Assignment]:
        return [a for a in self.assignments.values() if a.deployment == deployment and a.wanted is Wanted.RUN]

    def ready(self, deployment: str) -> int:
        return sum(self.conditions[a.replica] is Condition.READY for a in self.running(deployment))


def check(problem: Problem, drawn: Plan, limits: Limits) -> None:
    """Asserts that `drawn` is lawful for `problem`. Shares no code with the planner."""
    standing = {assignment.replica: assignment for assignment in problem.assignments}
    put_ids = [assignment.replica for assignment in drawn.puts]
    assert max(Counter([*put_ids, *drawn.deletes]).values(), default=1) == 1, "one id, two writes"
    assert set(drawn.deletes) <= standing.keys(), "deletes what is not there"
    nodes = {node.id: node for node in problem.nodes}
    deployments = {deployment.name: deployment for deployment in problem.deployments}
    for put in drawn.puts:
        if put.replica in standing:
            _check_change(put, standing[put.replica], problem)
        else:
            _check_new(put, deployments[put.deployment], nodes, problem, limits)
    after = {**standing, **{put.replica: put for put in drawn.puts}}
    for replica in drawn.deletes:
        del after[replica]
    _check_shares(after, put_ids, nodes)
    _check_places(problem, after)
    for entry in drawn.unplaced:
        assert entry.replicas > 0
        assert entry.reason
        assert entry.deployment in deployments


def _check_change(put: Assignment, before: Assignment, problem: Problem) -> None:
    assert replace(put, warmings=()) == replace(before, wanted=put.wanted), "a standing replica changes its place"
    steps = {
        Wanted.RUN: {Wanted.RETIRE, Wanted.DRAIN},
        Wanted.RETIRE: {Wanted.RUN, Wanted.DRAIN},
        Wanted.DRAIN: {Wanted.DRAIN},
    }
    assert put.wanted in steps[before.wanted], "what drains is called back, or nothing changes"
    assert bool(put.warmings) == (put.wanted is Wanted.RETIRE), "retires for nothing"
    for warming in put.warmings:
        heir = next(each for each in problem.assignments if each.replica == warming.successor)
        assert heir.wanted is Wanted.RUN, "an heir that leaves"
        assert problem.conditions[heir.replica] is Condition.READY, "an heir that does not serve"
        assert heir.deployment == put.deployment, "an heir of another model"


def _check_new(
    put: Assignment, deployment: Deployment, nodes: Mapping[str, Node], problem: Problem, limits: Limits
) -> None:
    assert put.wanted is Wanted.RUN
    assert put.spec == deployment.spec
    name, _, number = put.replica.rpartition("-")
    assert name == deployment.name
    assert str(int(number)) == number
    hosts = [member.node for member in put.members]
    assert len(hosts) == deployment.gang_size == len(set(hosts)), "a gang needs distinct nodes"
    for member in put.members:
        node = nodes[member.node]
        assert not node.draining
        assert node.id not in problem.unlisted
        assert node.id not in problem.settling
        assert deployment.engine in node.engines
        assert dict(deployment.node_selector).items() <= dict(node.labels).items()
        assert len(member.gpus) == deployment.gpus_per_node
        assert set(member.gpus) <= node.gpus
        assert member.gpus or not node.gpus, "a slot on a host with GPUs"
    assert (put.rendezvous_port in limits.rendezvous_ports) == (deployment.gang_size > 1)


def _check_shares(after: Mapping[str, Assignment], put_ids: list[str], nodes: Mapping[str, Node]) -> None:
    """No GPU, slot or port has two owners. What stood before may exceed a node that shrank; a put may not."""
    gpus = Counter((m.node, gpu) for a in after.values() for m in a.members for gpu in m.gpus)
    slots = Counter(m.node for a in after.values() for m in a.members if not m.gpus)
    ports = Counter((a.members[0].node, a.rendezvous_port) for a in after.values() if a.rendezvous_port)
    assert max(gpus.values(), default=1) == 1, "a GPU has two owners"
    assert max(ports.values(), default=1) == 1, "a port has two gangs"
    for replica in put_ids:
        for member in after[replica].members if after[replica].wanted is Wanted.RUN else ():
            assert member.gpus or slots[member.node] <= nodes[member.node].cpu_slots, "a slot has two owners"


def _check_places(problem: Problem, after: Mapping[str, Assignment]) -> None:
    """Power with all feeds and without those of any one source, groups and their GPUs, spread: of all that is new."""
    assert problem.ground is not None
    deployments = {deployment.name: deployment for deployment in problem.deployments}
    standing = {assignment.replica for assignment in problem.assignments}
    placed: dict[str, Placed] = {}
    for replica, a in after.items():
        leaves = a.deployment in deployments and _leaves(problem, a, new=replica not in standing)
        placed[replica] = Placed(replica, f"{a.deployment} leaving" if leaves else a.deployment, a.members)
    counts = Counter(each.deployment for each in placed.values())
    needs = [
        _need(deployment, counts[f"{name}{tail}"], problem, tail)
        for name, deployment in deployments.items()
        for tail in ("", " leaving")
    ]
    asked = PlacementProblem(
        problem.ground.facility,
        needs=tuple(replace(need, spread_over=frozenset()) for need in needs),
        standing=tuple(placed[replica] for replica in after if replica in standing),
        slots={node.id: node.cpu_slots for node in problem.nodes},
        engines={node.id: node.engines for node in problem.nodes},
    )
    wrong = [fault for fault in faults(asked, tuple(placed.values())) if " slots of " not in fault]
    assert not wrong, wrong
    for need in needs:
        _check_spread(problem, replace(asked, needs=(need,)), placed, after)


def _check_spread(
    problem: Problem, asked: PlacementProblem, placed: Mapping[str, Placed], after: Mapping[str, Assignment]
) -> None:
    """With all that run, or with all but one with another specification, which makes room for its successor."""
    (need,) = asked.needs
    mine = {name: each for name, each in placed.items() if each.deployment == need.deployment}
    specs = {deployment.name: deployment.spec for deployment in problem.deployments}
    given = {d.name: d.wishes.largest_share for d in problem.deployments}.get(need.deployment)
    outdated = [name for name in mine if after[name].spec != specs.get(need.deployment)]
    wrong: list[str] = []
    for but in ("", *outdated):
        kept = tuple(each for name, each in mine.items() if name != but)
        stood = tuple(each for each in asked.standing if each.replica != but)
        share = given or -(-len(kept) // 2) / max(1, len(kept))
        tried = replace(asked, standing=stood, needs=(replace(need, replicas=len(kept), largest_share=share),))
        wrong = [fault for fault in faults(tried, kept) if " end with " in fault]
        if not wrong:
            return
    raise AssertionError(wrong)


def _leaves(problem: Problem, assignment: Assignment, *, new: bool) -> bool:
    """Whether it is about to give up its place, so that a successor need not count it."""
    if assignment.wanted is not Wanted.RUN:
        return True
    if new:
        return False
    away = {node.id for node in problem.nodes if node.draining} | problem.lost
    moves = assignment.replica in problem.moves or bool({member.node for member in assignment.members} & away)
    return moves or not _stands(problem, assignment)


def _stands(problem: Problem, assignment: Assignment) -> bool:
    assert problem.ground is not None
    nodes = problem.ground.facility.nodes
    return all(
        m.node in nodes and set(m.gpus) <= {gpu.index for gpu in nodes[m.node].gpus} for m in assignment.members
    )


def _need(deployment: Deployment, replicas: int, problem: Problem, tail: str) -> Need:
    assert problem.ground is not None
    facility, wishes = problem.ground.facility, deployment.wishes
    spread = wishes.spread_over
    if tail:
        spread = frozenset()
    elif spread is None:
        # By default over racks; all of these tests' racks have two sources, and survive the loss of one.
        shut = {node.id for node in problem.nodes if node.draining} | problem.settling | problem.unlisted
        usable = {node.id for node in problem.nodes} - shut
        several = len({node.rack for node in facility.nodes.values() if node.name in usable}) > 1
        spread = frozenset({Domain.RACK}) if problem.applied and several else frozenset()
    return Need(
        deployment.name + tail,
        replicas,
        gpus=deployment.gpus_per_node,
        members=deployment.gang_size,
        tensor_parallel=wishes.tensor_parallel or max(1, deployment.gpus_per_node),
        node_selector=deployment.node_selector,
        engine=deployment.engine,
        busy_power=wishes.busy_power,
        spread_over=spread,
        largest_share=wishes.largest_share or -(-replicas // 2) / max(1, replicas),
    )


# --- scenarios in text -------------------------------------------------------------------------------------


def play(world: World, line: str) -> Iterator[str]:
    """Runs one line of a scenario and yields what it shows; see tests/scenarios/planner."""
    verb, *words = line.split()
    plain = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    match verb:
        case "round":
            yield from describe(world.step())
        case "show":
            yield from (_shown(assignment) for _, assignment in sorted(world.assignments.items()))
        case "node" | "drain-node" | "undrain-node" | "lose" | "return":
            for name in plain:
                _change_node(world, verb, name, options)
        case "facility":
            watts = float(options.pop("kw", "100"))
            racks = {rack: nodes for rack, nodes in options.items() if nodes}
            world.facility = facility_file.parse(hall(racks, rack_kw=watts), "facility") if racks else None
        case "violations":
            surface = ground_of_problem(world.problem())
            found = violations(world.problem(), surface)
            yield from (f"{each.limit}: {each.words} ({', '.join(each.replicas)})" for each in found)
            if not found:
                yield "all holds"
        case "move":
            world.moves[plain[0]] = tuple(Member(node) for node in plain[1:])
        case "deploy" | "scale" | "undeploy":
            _change_deployment(world, verb, plain, options)
        case _:
            _change_state(world, verb, plain)


def _change_node(world: World, verb: str, name: str, options: Mapping[str, str]) -> None:
    match verb:
        case "node":
            world.nodes[name] = _node(name, options)
        case "lose":
            world.lose(name)
        case "return":
            world.nodes[name] = world.absent.pop(name)
        case _:
            world.nodes[name] = replace(world.nodes[name], draining=verb == "drain-node")


def _change_deployment(world: World, verb: str, plain: list[str], options: Mapping[str, str]) -> None:
    name = plain[0]
    match verb:
        case "deploy":
            world.deployments[name] = _deployment(name, options)
            if "replicas" in options:
                world.desired[name] = Desired(int(options["replicas"]))
        case "scale":
            victims = tuple(filter(None, options.get("victims", "").split(",")))
            world.desired[name] = Desired(int(plain[1]), victims, _warmings(options.get("warm", "")))
        case _:
            del world.deployments[name]
            world.desired.pop(name, None)


def _change_state(world: World, verb: str, plain: list[str]) -> None:
    match verb:
        case "drain-replica":
            world.assignments[plain[0]] = replace(world.assignments[plain[0]], wanted=Wanted.DRAIN)
        case "retired":
            world.retired |= set(plain)
        case "ready" | "not_ready" | "gone":
            running = [replica for replica, a in world.assignments.items() if a.wanted is Wanted.RUN]
            world.conditions.update((name, Condition(verb)) for name in (running if plain == ["all"] else plain))
        case "pass":
            world.now += float(plain[0])
        case _:
            raise AssertionError(f"no such verb: {verb}")


def describe(drawn: Plan) -> Iterator[str]:
    for replica in drawn.deletes:
        yield f"delete {replica}  # {drawn.why[replica]}"
    for assignment in drawn.puts:
        yield f"{_shown(assignment)}  # {drawn.why[assignment.replica]}"
    for entry in drawn.unplaced:
        yield f"unplaced {entry.deployment} {entry.replicas}: {entry.reason}"
    yield from (f"cannot move {replica}: {why}" for replica, why in drawn.moves.items() if why)
    if drawn.quiet and not drawn.unplaced:
        yield "nothing"


def _shown(assignment: Assignment) -> str:
    port = f" port {assignment.rendezvous_port}" if assignment.rendezvous_port else ""
    warm = "".join(f" warm {each.leaf}:{each.successor}" for each in assignment.warmings)
    return (
        f"{assignment.wanted.value} {assignment.replica} on {' '.join(map(_member, assignment.members))}{port}{warm}"
    )


def _member(member: Member) -> str:
    return f"{member.node}{list(member.gpus)}" if member.gpus else member.node


def _node(name: str, options: Mapping[str, str]) -> Node:
    return Node(
        name,
        gpus=frozenset(range(int(options.get("gpus", "0")))),
        cpu_slots=int(options.get("slots", "0")),
        engines=frozenset(options.get("engines", "vllm").split(",")),
        labels=_labels(options.get("labels", "rack:r1")),
        draining="draining" in options,
    )


def _deployment(name: str, options: Mapping[str, str]) -> Deployment:
    return Deployment(
        name,
        spec=options.get("spec", "a"),
        engine=options.get("engine", "vllm"),
        gpus_per_node=int(options.get("gpus", "0")),
        gang_size=int(options.get("gang", "1")),
        node_selector=_labels(options.get("select", "")),
        wishes=_wishes(options),
    )


def _wishes(options: Mapping[str, str]) -> Wishes:
    share = options.get("share", "")
    return Wishes(
        tensor_parallel=int(options.get("tp", "0")),
        busy_power=Watts(int(options["watts"])) if "watts" in options else None,
        largest_share=float(share) if share else None,
    )


def ground_of_problem(problem: Problem) -> Ground:
    assert problem.ground is not None
    return problem.ground


def _warmings(text: str) -> dict[str, tuple[Warming, ...]]:
    """`chat-2:7:chat-0,…`: who leaves, the prefix, who shall compute it."""
    found: dict[str, tuple[Warming, ...]] = {}
    for leaver, leaf, heir in (part.split(":") for part in filter(None, text.split(","))):
        found[leaver] = (*found.get(leaver, ()), Warming(int(leaf), heir, 1_000))
    return found


def _labels(text: str) -> dict[str, str]:
    return dict(pair.split(":", 1) for pair in text.split(",") if pair)
