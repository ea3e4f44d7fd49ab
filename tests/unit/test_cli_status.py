"""`stoker status` on replicas that prefix routing does without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.router.v1 import router_pb2
from stoker.cli import report
from stoker.cli.fleet import Fleet
from stoker.cli.parity import parity, worst


def view(**said: str) -> router_pb2.GetViewResponse:
    replicas = [
        router_pb2.ReplicaView(replica=records_pb2.Replica(replica_id=name), parity=each)
        for name, each in said.items()
    ]
    return router_pb2.GetViewResponse(replicas=replicas)


def fleet(state: records_pb2.State.ValueType = records_pb2.STATE_READY) -> Fleet:
    return Fleet(registry_pb2.Records(replicas=[records_pb2.Replica(replica_id="r", deployment="d", state=state)]))


def printed(value: dict[str, object]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for each in report.as_tables(value):
        console.print(each)
    return out.getvalue()


def test_the_router_with_the_worst_to_say_is_heard() -> None:
    views = [view(a="ok", b="pending", c="ok"), view(a="pending", b="chat: token 3 differs", c="ok"), view(b="ok")]
    assert worst(views) == {"a": "pending", "b": "chat: token 3 differs", "c": "ok"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("chat: token 3 differs", "r: tokenizes otherwise than the router, chat: token 3 differs"),
        ("pending", "r: not proved yet"),
    ],
)
def test_a_replica_that_is_not_proved_alike_has_a_line(said: str, words: str) -> None:
    value = report.as_json(fleet(), {"r": said})
    assert value["replicas"][0]["parity"] == said
    assert words in printed(value)


@pytest.mark.parametrize("said", [{}, {"r": "ok"}])
def test_one_that_is_or_that_nobody_tells_of_has_none(said: dict[str, str]) -> None:
    value = report.as_json(fleet(), said)
    assert value["replicas"][0]["parity"] == said.get("r")
    assert "r: " not in printed(value)


def test_one_that_is_not_ready_is_not_expected_to_be_proved() -> None:
    assert "not proved" not in printed(report.as_json(fleet(records_pb2.STATE_STARTING), {"r": "pending"}))


async def test_a_router_that_does_not_answer_says_nothing() -> None:
    assert await parity(["127.0.0.1:9"], None) == {}
