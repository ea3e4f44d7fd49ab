"""Scalers that decide by policies, on a real registry and etcd: signals in, counts out, and what survives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import grpc
import pytest
from structlog.testing import capture_logs

from stoker.api.common.v1 import scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.cli import main as cli
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.control.config import LoopConfig
from stoker.planner import app as planner
from stoker.planner.config import PlannerConfig
from stoker.registry.client import FleetView, RegistryClient
from stoker.scaler import app
from stoker.scaler.config import ScalerConfig
from tests.support.deciders import TTL_S, running
from tests.support.demand import DemandingRouter, LoadedAgent
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import RegistryUnderTest, Watcher, config, node, spec
from tests.support.waiting import eventually

R = TypeVar("R")

CONCURRENCY = scaling_pb2.ScalingPolicy(
    kind=scaling_pb2.SCALING_KIND_CONCURRENCY,
    concurrency=scaling_pb2.ScalingConcurrency(target=2.0, utilisation=1.0, stable_s=4.0, panic_s=2.0),
    bounds=scaling_pb2.ScalingBounds(least=1, most=6),
    pace=scaling_pb2.ScalingPace(settle_s=4.0, down_cooldown_s=1.0, margin=0.0),
)


@pytest.fixture
async def registry(etcd_alone: EtcdServer) -> AsyncIterator[RegistryUnderTest]:
    async with RegistryUnderTest(config(etcd_alone.endpoint)) as registry:
        yield registry


def settings(registry: RegistryUnderTest, candidate: str = "one") -> ScalerConfig:
    return ScalerConfig(
        listen=f"127.0.0.1:{free_port()}",
        registries=(registry.endpoint,),
        sample_s=0.5,
        history_s=10.0,
        loop=LoopConfig(candidate=candidate, leader_ttl_s=TTL_S, tick_s=0.2),
    )


class Stage:
    """A registry with one agent, one router, a planner, and whoever scales."""

    def __init__(self, client: RegistryClient, watcher: Watcher, agent: LoadedAgent, router: DemandingRouter) -> None:
        self.client = client
        self.agent = agent
        self.router = router
        self.watcher = watcher
        self.view: FleetView = watcher.watch.view

    def count(self) -> int:
        return self.view.desired["chat"].replicas if "chat" in self.view.desired else -1

    def ready(self) -> int:
        return sum(r.state == records_pb2.STATE_READY for r in self.view.replicas.values())

    def led_by(self, candidate: str) -> bool:
        return "scaler" in self.view.leaders and self.view.leaders["scaler"].candidate == candidate

    def counts(self) -> list[int]:
        """Every count that was ever written."""
        told = [d.replicas for change in self.watcher.changes() for d in change.upserts.desired]
        return [count for place, count in enumerate(told) if place == 0 or count != told[place - 1]]


@asynccontextmanager
async def staged(registry: RegistryUnderTest) -> AsyncIterator[Stage]:
    endpoints = [registry.endpoint]
    plans = PlannerConfig(
        listen=f"127.0.0.1:{free_port()}",
        registries=(registry.endpoint,),
        loop=LoopConfig(candidate="planner", leader_ttl_s=TTL_S, tick_s=0.2),
    )
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(RegistryClient(endpoints))
        watcher = await stack.enter_async_context(Watcher(endpoints))
        big = node("n1")
        big.cpu_slots = 16
        agent = LoadedAgent(endpoints, big)
        await stack.enter_async_context(agent)
        router = await stack.enter_async_context(DemandingRouter(endpoints, "r1", "chat"))
        await stack.enter_async_context(running(planner.serve, plans))
        yield Stage(client, watcher, agent, router)


async def ask(endpoint: str, call: Callable[[scaler_pb2_grpc.ScalerServiceAsyncStub], Awaitable[R]]) -> R:
    async with rpc.channel(endpoint) as channel:
        stub: scaler_pb2_grpc.ScalerServiceAsyncStub = scaler_pb2_grpc.ScalerServiceStub(channel)
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from(error) from error


async def why(endpoint: str) -> scaler_pb2.WhyDeploymentResponse:
    request = scaler_pb2.WhyDeploymentRequest(deployment="chat")
    return await ask(endpoint, lambda stub: stub.WhyDeployment(request, timeout=5))


async def test_counts_follow_the_load_up_and_down(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    async with staged(registry) as stage, running(app.serve, mine):
        await stage.client.put_deployment(spec("chat", replicas=1, scaling=CONCURRENCY))
        await eventually(lambda: stage.ready() == 1, within_s=60)
        stage.agent.running, stage.router.queued = 1, 7
        await eventually(lambda: stage.count() >= 4, "queued requests ask for replicas", 60)
        stage.router.queued = 0
        desired = stage.view.desired["chat"]
        assert desired.because[0].numbers["per_replica"] == 2.0
        assert desired.reason in {"CONCURRENCY", "PANIC", "STEP"}
        stage.agent.running = 0
        await eventually(lambda: stage.count() == 1, "the count falls to the least", 60)
        assert stage.view.desired["chat"].replicas == 1
        told = await why(mine.listen)
        assert (told.standing.replicas, told.now.replicas, told.held) == (1, 1, "")
        assert told.now.because[-1].text
        assert told.samples[-1].queued == 0
        assert told.policy.pace.settle_s == 4.0
        assert told.policy.bounds.idle_s == 600.0, "defaults are filled in"
        assert list(told.group) == ["chat"]


async def test_without_signals_nothing_moves_and_the_reason_is_told(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    async with staged(registry) as stage, running(app.serve, mine):
        await stage.client.put_deployment(spec("chat", replicas=3, scaling=CONCURRENCY))
        stage.agent.running = 2
        await eventually(lambda: stage.ready() == 3, within_s=60)
        await eventually(lambda: "chat" in stage.view.scaling, "its history is kept", 60)

        async def says(code: str) -> bool:
            return code in [because.code for because in (await why(mine.listen)).now.because]

        await eventually(lambda: says("CONCURRENCY"), "6 requests in flight ask for 3", 60)
        stage.agent.silent = True
        await eventually(lambda: says("UNKNOWN"), "what is not reported is not taken for zero", 60)
        assert stage.count() == 3
        (unknown,) = [b for b in (await why(mine.listen)).now.because if b.code == "UNKNOWN"]
        assert unknown.numbers["running"] != unknown.numbers["running"], "NaN stands for unknown"


async def test_the_next_leader_goes_on_from_what_is_kept(registry: RegistryUnderTest) -> None:
    """The specification says 1: a scaler that forgot the policy, or took the missing for zero, would fall to it."""
    first, second = settings(registry, "one"), settings(registry, "two")
    async with staged(registry) as stage:
        async with running(app.serve, first):
            await stage.client.put_deployment(spec("chat", replicas=1, scaling=CONCURRENCY))
            await eventually(lambda: stage.ready() == 1, within_s=60)
            stage.router.queued = 8
            await eventually(lambda: stage.count() >= 4, within_s=60)
            stage.router.queued, stage.agent.running = 0, 2
            reached = stage.count()
            await eventually(lambda: "chat" in stage.view.scaling, within_s=60)
            await eventually(lambda: stage.ready() == reached, within_s=60)
        kept = stage.view.scaling["chat"]
        assert kept.wanted, "what was wanted lately is kept"
        assert kept.HasField("changed_at")
        assert kept.fence.role == "scaler"
        before = len(stage.counts())
        async with running(app.serve, second):
            await eventually(
                lambda: stage.view.leaders["scaler"].candidate == "two", within_s=60, not_yet=(KeyError,)
            )

            async def decides() -> scaler_pb2.WhyDeploymentResponse | None:
                told = await why(second.listen)
                return told if told.HasField("now") and told.now.because[0].code == "CONCURRENCY" else None

            told = await eventually(decides, "the new leader has signals of its own", 60, not_yet=(StokerError,))
            assert told.now.replicas == reached
            await eventually(lambda: stage.view.scaling["chat"].fence != kept.fence, within_s=60)
        assert stage.counts()[before:] == [], "nothing moved"


async def test_a_standby_knows_as_much_as_the_leader(registry: RegistryUnderTest) -> None:
    first, second = settings(registry, "one"), settings(registry, "two")
    async with staged(registry) as stage, running(app.serve, first):
        await stage.client.put_deployment(spec("chat", replicas=2, scaling=CONCURRENCY))
        stage.agent.running, stage.router.per_s = 1, 20.0
        await eventually(lambda: stage.ready() == 2, within_s=60)
        async with running(app.serve, second):

            async def alike() -> bool:
                told = [await why(endpoint) for endpoint in (first.listen, second.listen)]
                return all(
                    t.samples and t.samples[-1].arrivals_per_s > 10 and t.samples[-1].running == 2 for t in told
                )

            await eventually(alike, "both see the same demand", 60, not_yet=(StokerError,))
            told = await why(second.listen)
            assert told.standing == stage.view.desired["chat"]
            assert told.now.replicas == told.standing.replicas


async def test_of_two_deployments_that_share_a_demand_the_cheaper_grows(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    shared = scaling_pb2.ScalingPolicy(group="m")
    shared.MergeFrom(CONCURRENCY)
    dear = scaling_pb2.ScalingPolicy(price=scaling_pb2.ScalingPrice(per_hour=9.0))
    dear.MergeFrom(shared)
    why_dear = scaler_pb2.WhyDeploymentRequest(deployment="dear")
    async with (
        staged(registry) as stage,
        running(app.serve, mine),
        DemandingRouter([registry.endpoint], "r2", "m", "cheap", "dear") as router,
    ):
        await stage.client.put_deployment(spec("cheap", served_model_name="m", scaling=shared))
        await stage.client.put_deployment(spec("dear", served_model_name="m", scaling=dear))
        await eventually(lambda: stage.ready() == 2, within_s=60)
        # 2 that run and 6 that wait: 4 replicas at 2 each, wherever they are.
        stage.agent.running, router.queued = 1, 6
        desired = stage.view.desired
        await eventually(lambda: desired["cheap"].replicas >= 3, "the cheaper grows by what is missing", 60)
        assert desired["dear"].replicas == 1
        told = await ask(mine.listen, lambda stub: stub.WhyDeployment(why_dear, timeout=5))
        assert list(told.group) == ["cheap", "dear"]
        assert 0 < told.samples[-1].queued < 6, "its share of what waits"


async def test_dry_runs_policies_and_pauses(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    async with staged(registry) as stage, running(app.serve, mine):
        await stage.client.put_deployment(spec("chat", replicas=2))
        stage.agent.running = 6
        await eventually(lambda: stage.ready() == 2, within_s=60)
        tried = scaler_pb2.DryRunRequest(deployment="chat", policy=CONCURRENCY)

        async def would_grow() -> bool:
            answer = await ask(mine.listen, lambda stub: stub.DryRun(tried, timeout=5))
            return answer.decision.replicas == 6

        await eventually(would_grow, "12 requests at 2 a replica", 60)
        assert stage.count() == 2, "nothing is written"
        pause = scaler_pb2.PauseRequest(deployment="chat", note="incident")
        await ask(mine.listen, lambda stub: stub.Pause(pause, timeout=5))
        change = scaler_pb2.SetPolicyRequest(deployment="chat", policy=CONCURRENCY, expected_generation=1)
        written = await ask(mine.listen, lambda stub: stub.SetPolicy(change, timeout=5))
        assert written.deployment.generation == 2

        async def paused() -> bool:
            told = await why(mine.listen)
            return told.pause.note == "incident" and "PAUSED" in [because.code for because in told.now.because]

        await eventually(paused, within_s=60)
        await eventually(lambda: stage.view.desired["chat"].generation == 2, within_s=60)
        assert stage.count() == 2
        resume = scaler_pb2.ResumeRequest(deployment="chat")
        await ask(mine.listen, lambda stub: stub.Resume(resume, timeout=5))
        await eventually(lambda: stage.count() > 2, "the policy decides again", 60)


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (scaler_pb2.WhyDeploymentRequest(deployment="nobody"), "NOT_FOUND", ""),
        (scaler_pb2.WhyDeploymentRequest(deployment="No One"), "INVALID_REQUEST", "deployment"),
        (scaler_pb2.WhyDeploymentRequest(deployment="chat", samples=1_001), "INVALID_REQUEST", "samples"),
        (scaler_pb2.WhyDeploymentRequest(deployment="chat", minutes=99_999), "INVALID_REQUEST", "minutes"),
    ],
)
async def test_what_cannot_be_asked_is_refused_with_its_field(
    registry: RegistryUnderTest, request_: scaler_pb2.WhyDeploymentRequest, reason: str, field: str
) -> None:
    mine = settings(registry)
    async with RegistryClient([registry.endpoint]) as client, running(app.serve, mine):
        await client.put_deployment(spec("chat"))
        assert await rpc.wait_serving(mine.listen, 10)
        with pytest.raises(StokerError) as refused:
            await ask(mine.listen, lambda stub: stub.WhyDeployment(request_, timeout=5))
        assert refused.value.reason == reason
        assert [violation.field for violation in refused.value.fields] == ([field] if field else [])


async def test_a_policy_that_could_never_work_is_refused_in_a_dry_run(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    broken = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_SLO, slo=scaling_pb2.ScalingSlo(attainment=1.5))
    async with RegistryClient([registry.endpoint]) as client, running(app.serve, mine):
        await client.put_deployment(spec("chat"))
        assert await rpc.wait_serving(mine.listen, 10)
        request = scaler_pb2.DryRunRequest(deployment="chat", policy=broken)
        with pytest.raises(StokerError) as refused:
            await ask(mine.listen, lambda stub: stub.DryRun(request, timeout=5))
        assert [violation.field for violation in refused.value.fields] == ["policy.slo.attainment"]


async def test_the_command_line_asks_and_changes(
    registry: RegistryUnderTest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = settings(registry)
    monkeypatch.setenv("STOKER_REGISTRY", registry.endpoint)
    monkeypatch.setenv("STOKER_SCALER", mine.listen)

    async def stoker(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(cli._run, list(words)) == status
        shown = capsys.readouterr()
        return shown.out + shown.err

    with capture_logs():  # of the services in this process, that they do not stand between what is printed
        async with staged(registry) as stage, running(app.serve, mine):
            await stage.client.put_deployment(spec("chat", replicas=2))
            await eventually(lambda: stage.ready() == 2, within_s=60)
            told = json.loads(await stoker("scaler", "why", "chat", "-o", "json"))
            assert (told["deployment"], told["standing"]["replicas"]) == ("chat", 2)
            assert "stands: 2 FIXED" in await stoker("scaler", "why", "chat")
            single = ("--set", "bounds.least=3", "--set", "pace.settle_s=4")
            tried = await stoker("scaler", "dry-run", "chat", "--policy", "concurrency", *single, "-o", "json")
            assert json.loads(tried)["decision"]["replicas"] == 3
            assert "AT_LEAST" in await stoker("scaler", "dry-run", "chat", "--policy", "concurrency", *single)
            assert stage.count() == 2
            await stoker("scaler", "policy", "chat", "--policy", "concurrency", *single)
            await eventually(lambda: stage.count() == 3, within_s=60)
            await stoker("scaler", "policy", "chat", "--set", "bounds.most=5")
            kept = json.loads(await stoker("scaler", "policy", "chat", "-o", "json"))["policy"]
            assert (kept["kind"], kept["bounds"]["least"], kept["bounds"]["most"]) == ("concurrency", 3, 5)
            assert "scaler policy" in await stoker("scale", "chat", "4", status=1)
            await stoker("scaler", "pause", "chat", "--note", "incident 7")
            shown = await stoker("status")
            assert "concurrency, paused" in shown
            assert "incident 7" in await stoker("scaler", "why", "chat")
            await stoker("scaler", "resume", "chat")
            await stoker("scaler", "policy", "chat", "--remove")
            await eventually(lambda: stage.count() == 2, within_s=60)
            assert "did you mean bounds" in await stoker(
                "scaler", "policy", "chat", "--set", "bound.most=1", status=2
            )
            assert "does not exist" in await stoker("scaler", "why", "nobody", status=1)
