"""What a scaler makes of digests and dispatches."""

from __future__ import annotations

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import block_keys, pack_keys, root_key, sampled
from stoker.registry.client import DigestChanged, DispatchesSeen, FleetView, RecordsChanged
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.core.decide import decide
from stoker.scaler.observed import fleet_of
from stoker.scaler.watching import Watching
from tests.support.registry import delta, snapshot

NAMES = ["chat-0", "chat-1", "chat-2"]


def replica(name: str) -> records_pb2.Replica:
    engine = records_pb2.EngineInfo(block_size=16)
    return records_pb2.Replica(
        replica_id=name,
        deployment="chat",
        node_id="n1",
        state=records_pb2.STATE_READY,
        wanted=records_pb2.WANTED_RUN,
        engine=engine,
    )


def watching(replicas: int = 1) -> Watching:
    view = FleetView()
    spec = common_pb2.DeploymentSpec(name="chat", model="m", replicas=replicas)
    node = common_pb2.Node(node_id="n1", labels={"rack": "north"})
    records: list[tuple[Name, Record]] = [
        ((Kind.DEPLOYMENTS, "chat"), records_pb2.Deployment(spec=spec, generation=1)),
        ((Kind.NODES, "n1"), node),
        *(((Kind.REPLICAS, name), replica(name)) for name in NAMES),
    ]
    view.delta(records, (), 1)
    heard = Watching(view, 2.0, wall=lambda: 1e9)
    heard.catch_up(0.0)
    return heard


def prompt(user: str, blocks: int) -> list[int]:
    return block_keys(range(16 * blocks), 16, root_key("m", cache_salt=user))


def ask(heard: Watching, name: str, keys: list[int], now: float) -> None:
    dispatch = registry_pb2.Dispatch(replica_id=name, touched=pack_keys(sampled(keys)))
    heard.hear(DispatchesSeen("router-1", (dispatch,)), now)


def busy() -> Watching:
    """Each replica holds a prompt that was asked for each minute; that of chat-1 has not been for long."""
    heard = watching()
    for user, name in zip("abc", NAMES, strict=True):
        keys = prompt(user, 2_000)
        heard.hear(DigestChanged(snapshot(name, set(keys), 1)), 0.0)
        for minute in range(20 if name != "chat-1" else 8):
            ask(heard, name, keys, 60.0 * minute)
    return heard


def test_the_replica_whose_conversation_is_over_goes() -> None:
    heard = busy()
    worths = heard.caches.worths({"chat": NAMES[:2]}, 1_200.0)
    decisions = decide(fleet_of(heard._view, {}), 1_200.0, worths=worths)
    assert decisions.made[0].victims[0] == "chat-1"
    whole = worths["chat"].lost_with(NAMES)
    assert 0.6 < whole / (2 * 2_000 * 16) < 1.1, "what two of them are asked for, by one block in sixteen"


def test_digests_are_followed_by_tier_and_rank() -> None:
    heard = busy()
    keys = set(prompt("a", 2_000))
    other = delta("chat-0", keys, 1, keys)
    other.tier, other.dp_rank = common_pb2.TIER_CPU, 1
    heard.hear(DigestChanged(other), 1_200.0)
    before = heard.caches.worths({"chat": ["chat-0"]}, 1_200.0)["chat"].lost_with(["chat-0"])
    heard.hear(DigestChanged(delta("chat-0", set(), 2, set(), keys)), 1_200.0)
    kept = heard.caches.worths({"chat": ["chat-0"]}, 1_200.0)["chat"].lost_with(["chat-0"])
    assert before == kept > 0, "its other tier has them all"
    gone = snapshot("chat-0", set(), 3)
    gone.tier, gone.dp_rank = common_pb2.TIER_CPU, 1
    heard.hear(DigestChanged(gone), 1_200.0)
    assert heard.caches.worths({"chat": ["chat-0"]}, 1_200.0)["chat"].lost_with(["chat-0"]) == 0


def test_what_goes_is_computed_by_those_that_stay() -> None:
    heard = busy()
    plans = heard.caches.warmings("chat", ["chat-0"], ["chat-1", "chat-2"], 1e6, 1_200.0)
    assert plans
    keys = prompt("a", 2_000)
    for plan in plans:
        assert plan.holder == "chat-0"
        assert plan.successor in ("chat-1", "chat-2")
        assert plan.leaf in keys
    assert 0.8 < sum(plan.tokens for plan in plans) / (2_000 * 16) < 1.2
    assert not heard.caches.warmings("chat", ["chat-0"], ["chat-1"], 0.0, 1_200.0)


def test_a_replica_that_is_gone_is_forgotten_and_nobody_hears_of_strangers() -> None:
    heard = busy()
    heard._view.delta([], [(Kind.REPLICAS, "chat-0")], 2)
    gone = registry_pb2.Removals(replicas=["chat-0"])
    heard.hear(RecordsChanged(registry_pb2.Records(), gone, False), 1_200.0)
    ask(heard, "stranger-0", prompt("a", 100), 1_200.0)
    heard.hear(DigestChanged(snapshot("stranger-0", {16}, 1)), 1_200.0)
    worth = heard.caches.worths({"chat": [], "stranger": []}, 1_200.0)
    assert worth.keys() == {"chat"}
    assert worth["chat"].lost_with(["chat-0"]) == 0


def test_packed_keys_that_are_no_whole_number_do_no_harm() -> None:
    heard = watching()
    heard.hear(DispatchesSeen("r", (registry_pb2.Dispatch(replica_id="chat-0", touched=b"123"),)), 0.0)


def test_a_replicas_rack_is_its_nodes() -> None:
    assert {each.domain for each in watching().fleet()().replicas} == {"north"}
