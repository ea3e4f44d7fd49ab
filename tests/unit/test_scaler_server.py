"""The scaler between records and its core."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.scaler.v1 import scaler_pb2
from stoker.common.errors import NotFound
from stoker.registry.client import FleetView
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.config import ScalerConfig
from stoker.scaler.core.decide import decide
from stoker.scaler.core.values import Decisions, Desired, Load, Reason, Standing
from stoker.scaler.decision_messages import desired_record
from stoker.scaler.observed import fleet_of, load_of
from stoker.scaler.rounds import ScalerRound
from stoker.scaler.server import ScalerServicer
from stoker.scaler.watching import Watching


def view_of(*records: tuple[Kind, str, Record]) -> FleetView:
    view = FleetView()
    named: list[tuple[Name, Record]] = [((kind, name), record) for kind, name, record in records]
    view.delta(named, (), 1)
    return view


@pytest.mark.parametrize("state", records_pb2.State.values())
def test_every_state_has_a_standing_and_only_ready_is_ready(state: records_pb2.State.ValueType) -> None:
    replica = records_pb2.Replica(replica_id="chat-0", deployment="chat", state=state)
    (seen,) = fleet_of(view_of((Kind.REPLICAS, "chat-0", replica)), {}).replicas
    assert (seen.standing is Standing.READY) == (state == records_pb2.STATE_READY)


def test_what_a_load_report_leaves_unset_stays_unknown() -> None:
    report = registry_pb2.ReplicaLoad(replica_id="chat-0", running=0, age_ms=1500)
    assert load_of(report, now=100.0) == Load(seen_at=98.5, running=0, waiting=None, queued_prefill_tokens=None)


def test_what_was_written_is_read_back_as_no_news() -> None:
    deployment = records_pb2.Deployment(spec=common_pb2.DeploymentSpec(name="chat", replicas=1), generation=2)
    replicas: list[tuple[Kind, str, Record]] = [
        (Kind.REPLICAS, name, records_pb2.Replica(replica_id=name, deployment="chat", state=records_pb2.STATE_READY))
        for name in ("chat-0", "chat-1")
    ]
    view = view_of((Kind.DEPLOYMENTS, "chat", deployment), *replicas)
    decisions = decide(fleet_of(view, {}), 0.0)
    (decided,), (decision,) = decisions.changed, decisions.made
    fence = common_pb2.Fence(role="scaler", revision=5)
    record = desired_record(decided, decision, fence, paused=False)
    assert record.fence == fence
    assert record.decided_at.seconds > 0
    view.delta([((Kind.DESIRED, "chat"), record)], (), 2)
    assert decide(fleet_of(view, {}), 0.0).quiet


def test_a_reason_of_another_version_is_kept_as_it_is_read() -> None:
    record = records_pb2.Desired(deployment="chat", replicas=1, generation=1, reason="FORECAST")
    (desired,) = fleet_of(view_of((Kind.DESIRED, "chat", record)), {}).desired
    assert desired == Desired("chat", 1, 1, (), "FORECAST")
    assert desired.reason != Reason.FIXED


@pytest.mark.looptime
async def test_a_deployment_that_is_deleted_while_it_is_decided_on_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = records_pb2.Deployment(spec=common_pb2.DeploymentSpec(name="chat", replicas=1), generation=2)
    deployment.pause.note = "incident"
    view = view_of((Kind.DEPLOYMENTS, "chat", deployment))
    watching = Watching(view, 2.0, lambda: 1.7e9)
    round_ = ScalerRound(cast(Any, None), view, watching, ScalerConfig())
    decided = round_.decided

    async def deleted(*arguments: Any) -> Decisions:
        found = await decided(*arguments)
        view.delta((), [(Kind.DEPLOYMENTS, "chat")], view.revision + 1)
        watching.catch_up(0.0)
        return found

    watch = SimpleNamespace(view=view, synced=asyncio.Event(), stale=False)
    watch.synced.set()
    servicer = ScalerServicer(cast(Any, SimpleNamespace(holding="")), cast(Any, watch), round_, cast(Any, None))
    request = scaler_pb2.WhyDeploymentRequest(deployment="chat")
    told = await servicer.WhyDeployment(request, cast(Any, None))
    assert told.now.paused
    monkeypatch.setattr(round_, "decided", deleted)
    with pytest.raises(NotFound, match="deleted meanwhile"):
        await servicer.WhyDeployment(request, cast(Any, None))
    with pytest.raises(NotFound, match="does not exist"):
        await servicer.DryRun(scaler_pb2.DryRunRequest(deployment="chat"), cast(Any, None))
