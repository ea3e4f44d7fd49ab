"""Fleet state, gangs and the expiry guard."""

from __future__ import annotations

import pytest

from stoker.api.registry.v1 import records_pb2
from stoker.registry.core import gang, keys
from stoker.registry.core.expiry import ExpiryGuard
from stoker.registry.core.fleet import Entry, FleetState, Step
from stoker.registry.core.keys import Key, Space
from stoker.registry.core.records import Kind
from tests.support.registry import assignment, node, spec, status

READY, STARTING, BACKOFF, PENDING = (
    records_pb2.STATE_READY,
    records_pb2.STATE_STARTING,
    records_pb2.STATE_BACKOFF,
    records_pb2.STATE_PENDING,
)


class World:
    """etcd's side of a fleet state."""

    def __init__(self, guard: ExpiryGuard | None = None) -> None:
        self.state = FleetState(guard or ExpiryGuard(share=1.0))
        self.revision = 0
        self.now = 0.0

    def write(self, *writes: tuple[str, bytes], delete: tuple[str, ...] = ()) -> Step:
        self.revision += 1
        entries = [Entry(key, value, self.revision, self.revision) for key, value in writes]
        return self.state.apply(entries, delete, self.revision, self.now)

    def join(self, node_id: str) -> Step:
        return self.write((keys.node(node_id), node(node_id).SerializeToString()))

    def assign(self, replica_id: str, *nodes: str) -> records_pb2.Assignment:
        self.write((keys.assignment(replica_id), assignment(replica_id, *nodes).SerializeToString()))
        record = self.state.records[Kind.ASSIGNMENTS, replica_id]
        assert isinstance(record, records_pb2.Assignment)
        return record

    def report(
        self, of: records_pb2.Assignment, state: records_pb2.State.ValueType = READY, rank: int = 0, attempt: int = 1
    ) -> Step:
        said = status(node(of.members[rank].node_id), of, state, rank)
        said.attempt = attempt
        return self.write((keys.member(of.replica_id, rank), said.SerializeToString()))

    def replica(self, replica_id: str) -> records_pb2.Replica:
        record = self.state.records[Kind.REPLICAS, replica_id]
        assert isinstance(record, records_pb2.Replica)
        return record


@pytest.mark.parametrize("space", list(Space))
def test_keys_survive_a_round_trip(space: Space) -> None:
    key = Key(space, "chat-0", 3 if space is Space.MEMBER else 0)
    assert keys.parse(str(key)) == key


@pytest.mark.parametrize(
    "key", ["", "/stoker/v1/", "/stoker/v1/nodes", "/stoker/v1/nodes/", "/stoker/v1/members/a", "/stoker/v2/nodes/a"]
)
def test_unknown_keys_are_left_alone(key: str) -> None:
    assert keys.parse(key) is None
    assert not World().write((key, b"x")).change


def test_a_replica_goes_from_pending_to_ready_with_its_engine() -> None:
    world = World()
    world.join("n1")
    chat = world.assign("chat-0", "n1")
    assert (world.replica("chat-0").state, world.replica("chat-0").HasField("engine")) == (PENDING, False)
    step = world.report(chat)
    assert [name for name, _ in step.change.upserts] == [(Kind.REPLICAS, "chat-0")]
    replica = world.replica("chat-0")
    assert (replica.state, replica.epoch, replica.engine.block_size) == (READY, 1, 16)
    assert replica.agent_endpoint == "127.0.0.1:7330"


@pytest.mark.parametrize(
    ("leader", "member", "expected"),
    [
        (READY, READY, READY),
        (READY, None, PENDING),
        (READY, STARTING, STARTING),
        (READY, BACKOFF, BACKOFF),
        (STARTING, BACKOFF, BACKOFF),
        (READY, records_pb2.STATE_UNHEALTHY, records_pb2.STATE_UNHEALTHY),
        (records_pb2.STATE_DRAINING, READY, records_pb2.STATE_DRAINING),
        (READY, records_pb2.STATE_UNSPECIFIED, PENDING),
    ],
)
def test_a_gang_is_as_good_as_its_worst_member(
    leader: records_pb2.State.ValueType,
    member: records_pb2.State.ValueType | None,
    expected: records_pb2.State.ValueType,
) -> None:
    world = World()
    big = world.assign("big-0", "n1", "n2")
    world.report(big, leader)
    if member is not None:
        world.report(big, member, rank=1)
    assert world.replica("big-0").state == expected


def test_ready_members_of_different_starts_are_not_ready_together() -> None:
    world = World()
    big = world.assign("big-0", "n1", "n2")
    world.report(big, attempt=2)
    world.report(big, rank=1, attempt=1)
    assert world.replica("big-0").state == STARTING


def test_statuses_of_an_earlier_assignment_or_another_node_say_nothing() -> None:
    world = World()
    old = world.assign("chat-0", "n1")
    world.report(old)
    world.write(delete=(keys.assignment("chat-0"),))
    new = world.assign("chat-0", "n2")
    assert world.replica("chat-0").state == PENDING
    assert not gang.obeys(status(node("n1"), old), new)
    assert not gang.obeys(status(node("n1"), new), new)


def test_a_change_tells_the_nodes_that_it_concerns_and_no_other() -> None:
    world = World()
    big = world.assign("big-0", "n1", "n2")
    assert world.report(big).tell == {"n2"}, "its own status is no news to a node"
    assert world.join("n1").tell == {"n2"}, "the address of a peer is"
    assert world.join("n9").tell == frozenset()
    told = world.state.assignments_of("n2")
    assert [a.replica_id for a in told.assignments] == ["big-0"]
    assert [(p.node_id, p.state) for p in told.peers] == [("n1", READY)]
    assert [n.node_id for n in told.nodes] == ["n1"]
    moved = world.write((keys.assignment("big-0"), assignment("big-0", "n2", "n3").SerializeToString()))
    assert moved.tell == {"n1", "n2", "n3"}, "also the node that has nothing to run any more"


def test_a_repeated_write_changes_nothing() -> None:
    world = World()
    world.join("n1")
    assert not world.join("n1").change


def test_draining_outlives_the_node_and_is_merged_into_it() -> None:
    world = World()
    world.join("n1")
    world.write((keys.node_draining("n1"), b""))
    assert world.state.records[Kind.NODES, "n1"].draining  # type: ignore[union-attr]
    world.write(delete=(keys.node("n1"),))
    assert (Kind.NODES, "n1") not in world.state.records
    world.join("n1")
    assert world.state.records[Kind.NODES, "n1"].draining  # type: ignore[union-attr]
    world.write(delete=(keys.node_draining("n1"),))
    assert not world.state.records[Kind.NODES, "n1"].draining  # type: ignore[union-attr]


def test_an_unreadable_value_costs_that_record_alone() -> None:
    world = World()
    chat = records_pb2.Deployment(spec=spec("chat"), generation=1).SerializeToString()
    step = world.write((keys.deployment("chat"), chat), (keys.deployment("bad"), b"\xff\xff"))
    assert step.unreadable == (keys.deployment("bad"),)
    assert [name for name, _ in step.change.upserts] == [(Kind.DEPLOYMENTS, "chat")]


def test_a_leaders_fence_is_the_revision_of_its_key() -> None:
    world = World()
    world.write((keys.leader("scaler"), records_pb2.Leader(candidate="a").SerializeToString()))
    leader = world.state.records[Kind.LEADERS, "scaler"]
    assert leader == records_pb2.Leader(role="scaler", candidate="a", revision=world.revision)


# The expiry guard, in the state


def fleet(count: int, guard: ExpiryGuard) -> World:
    world = World(guard)
    for i in range(count):
        world.join(f"n{i}")
        world.report(world.assign(f"chat-{i}", f"n{i}"))
    return world


def expire(world: World, *nodes: int) -> Step:
    gone = [key for i in nodes for key in (keys.member(f"chat-{i}", 0), keys.node(f"n{i}"))]
    return world.write(delete=tuple(gone))


def visible(world: World) -> set[str]:
    return {name for kind, name in world.state.records if kind is Kind.NODES}


def test_one_lost_node_goes_at_once_with_what_it_ran() -> None:
    world = fleet(4, ExpiryGuard(share=0.2))
    step = expire(world, 2)
    assert (Kind.NODES, "n2") in step.change.removals
    assert world.replica("chat-2").state == PENDING


def test_of_many_lost_at_once_a_share_goes_and_the_rest_is_held_with_what_it_runs() -> None:
    world = fleet(10, ExpiryGuard(share=0.2, grace_s=30, pace_s=1))
    step = expire(world, *range(10))
    assert step.change.removals == ((Kind.NODES, "n0"), (Kind.NODES, "n1"))
    assert len(visible(world)) == 8
    assert [world.replica(f"chat-{i}").state for i in range(10)] == [PENDING] * 2 + [READY] * 8


def test_a_held_node_that_returns_was_never_gone() -> None:
    world = fleet(10, ExpiryGuard(share=0.2, grace_s=30, pace_s=1))
    expire(world, *range(10))
    world.now = 20
    step = world.join("n5")
    assert not [name for name, _ in step.change.upserts if name[0] is Kind.NODES]
    assert world.replica("chat-5").state == PENDING, "it came back without its member: that one is gone"
    chat = world.state.records[Kind.ASSIGNMENTS, "chat-6"]
    assert isinstance(chat, records_pb2.Assignment)
    both = world.write(
        (keys.node("n6"), node("n6").SerializeToString()),
        (keys.member("chat-6", 0), status(node("n6"), chat).SerializeToString()),
    )
    assert not both.change


def test_held_nodes_go_one_by_one_after_the_grace_window() -> None:
    world = fleet(10, ExpiryGuard(share=0.2, grace_s=30, pace_s=1))
    expire(world, *range(10))
    gone = []
    for tenth in range(600):
        world.now = tenth / 10
        gone += [(world.now, name) for kind, name in world.state.release(world.now).change.removals]
    assert [name for _, name in gone] == [f"n{i}" for i in range(2, 10)]
    assert [at for at, _ in gone] == [30 + i for i in range(8)]
    assert visible(world) == set()


def test_a_node_that_said_goodbye_is_not_held() -> None:
    world = fleet(10, ExpiryGuard(share=0.0, grace_s=30, pace_s=1))
    for i in range(10):
        world.write((keys.node(f"n{i}"), node(f"n{i}", draining=True).SerializeToString()))
    expire(world, *range(10))
    assert visible(world) == set()


def test_losses_spread_over_time_are_believed() -> None:
    guard = ExpiryGuard(share=0.2, grace_s=30)
    dropped = [guard.lost(f"n{i}", 10 - i, now=40.0 * i) for i in range(8)]
    assert all(dropped)


def test_nodes_with_work_that_are_not_here_are_absent() -> None:
    world = World()
    world.assign("chat-0", "n1")
    assert world.state.absent() == {"n1"}
    world.join("n1")
    assert world.state.absent() == set()


def test_the_recorded_incarnation_is_known() -> None:
    world = World()
    assert world.state.incarnation("n1") == 0
    world.write((keys.node("n1"), node("n1", incarnation=7).SerializeToString()))
    assert world.state.incarnation("n1") == 7
