"""Replicas that die in the middle of a Generate stream: another goes on, where that can be done truly."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from stoker.router import metrics
from tests.support.etcd import EtcdServer
from tests.support.fleet import Fleet, pid_on_port, running_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault

TOKENS = 60
Break = Callable[[Fleet, str], None]


def text(**sampling: Any) -> inference_pb2.GenerateRequest:
    wanted = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return inference_pb2.GenerateRequest(
        model="tiny", text="Feed the fire, stoker. " * 20, sampling=inference_pb2.Sampling(**wanted)
    )


def kill(fleet: Fleet, replica: str) -> None:
    port = int(fleet.router.view.targets[replica].url.rsplit(":", 1)[1])
    os.killpg(pid_on_port(fleet, port), signal.SIGKILL)


@asynccontextmanager
async def fleet_of(
    folder: Path, etcd: EtcdServer, *settings: str, replicas: int = 2
) -> AsyncIterator[tuple[Fleet, Any]]:
    args = ("--sim-step-ms", "20")
    async with running_fleet(folder, etcd, replicas=replicas, args=args, settings=settings) as fleet:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
            yield fleet, inference_pb2_grpc.InferenceServiceStub(channel)
        await eventually(lambda: fleet.router.router.in_flight == 0, "no request is left")
        assert fleet.router.view.pools["tiny"].fleet.load.in_flight == 0
        assert not any(target.in_flight for target in fleet.router.view.targets.values())


async def undisturbed(stub: Any, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=30)]


async def broken(
    fleet: Fleet, stub: Any, request: inference_pb2.GenerateRequest, *, after: int = 8, times: int = 1
) -> list[inference_pb2.GenerateResponse]:
    """The same, and whoever serves is killed after so many tokens, and again after so many more."""
    got: list[inference_pb2.GenerateResponse] = []
    killed: set[str] = set()
    pieces = 0
    async for response in stub.Generate(request, timeout=60):
        got.append(response)
        pieces += response.HasField("delta")
        if pieces >= after and len(killed) < times:
            targets = fleet.router.view.targets.values()
            serving = {target.id for target in targets if target.in_flight} - killed
            if serving:
                killed |= serving
                kill(fleet, *serving)
                pieces = 0
    assert len(killed) == times
    return got


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def said(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.delta.text for response in responses)


def tokens(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.delta.token_ids]


def shape(responses: list[inference_pb2.GenerateResponse]) -> list[str]:
    kinds = [str(response.WhichOneof("event")) for response in responses]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]


async def test_a_greedy_answer_is_the_same_with_and_without_a_death(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone) as (fleet, stub):
        taken = metrics.of(metrics.RETRIES, "taken")._value.get()
        request = text()
        request.return_token_ids = True
        whole = await undisturbed(stub, request)
        joined = await broken(fleet, stub, request)
        assert shape(joined) == ["started", "delta", "finished"]
        assert said(joined) == said(whole)
        assert tokens(joined) == tokens(whole)
        assert joined[-2].delta.finish_reason == "length"
        finished = joined[-1].finished
        assert finished.continued
        assert not whole[-1].finished.continued
        assert finished.usage.completion_tokens == TOKENS
        assert finished.usage.prompt_tokens == whole[-1].finished.usage.prompt_tokens
        assert not finished.usage.HasField("cached_prompt_tokens"), "what the dead one had found is not known"
        assert metrics.of(metrics.RETRIES, "taken")._value.get() == taken + 1, "within the retry budget"


async def test_token_ids_that_nobody_asked_for_do_not_show(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone) as (fleet, stub):
        joined = await broken(fleet, stub, text(temperature=0.8))
        assert tokens(joined) == []
        assert joined[-1].finished.continued
        assert joined[-1].finished.usage.completion_tokens == TOKENS, "a sampled answer goes on too"


async def test_a_chat_goes_on_in_its_own_turn(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone) as (fleet, stub):
        request = text()
        part = inference_pb2.ContentPart(text="Feed the fire, stoker.")
        request.chat.messages.append(inference_pb2.ChatMessage(role="user", content=[part]))
        whole = await undisturbed(stub, request)
        joined = await broken(fleet, stub, request)
        assert said(joined) == said(whole)
        assert joined[-1].finished.usage.prompt_tokens == whole[-1].finished.usage.prompt_tokens


async def test_an_answer_survives_two_deaths(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone, replicas=3) as (fleet, stub):
        whole = await undisturbed(stub, text())
        joined = await broken(fleet, stub, text(), times=2)
        assert said(joined) == said(whole)
        assert joined[-1].finished.usage.completion_tokens == TOKENS


async def test_a_stop_text_across_the_seam_ends_the_answer(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone) as (fleet, stub):
        whole = said(await undisturbed(stub, text()))
        # Wherever it breaks between these, the text is begun by the one engine and ended by the other.
        stop = whole[10 : len(whole) * 2 // 3]
        joined = await broken(fleet, stub, text(stop=[stop]))
        assert said(joined) == whole[:10] or said(joined) == whole[: len(said(joined))]
        assert joined[-2].delta.finish_reason == "stop"
        assert joined[-2].delta.stop_reason == stop
        assert joined[-1].finished.continued


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ((), {"temperature": 0.8, "seed": 7}),
        ((), {"presence_penalty": 0.5}),
        ((), {"temperature": 0.8, "n": 2}),
        ((), {"logprobs": 1}),
        (("limits.continuation=never",), {}),
        (("limits.continuation=greedy",), {"temperature": 0.8}),
        (("limits.retries=0",), {}),
    ],
)
async def test_what_cannot_be_continued_truly_ends_with_its_replica(
    tmp_path: Path, etcd_alone: EtcdServer, settings: tuple[str, ...], sampling: dict[str, Any]
) -> None:
    async with fleet_of(tmp_path, etcd_alone, *settings) as (fleet, stub):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await broken(fleet, stub, text(**sampling))
        error = rpc.error_from(failed.value)
        assert (error.reason, error.metadata["emitted"]) == ("ENGINE_DIED", "true")


async def test_where_nobody_is_left_the_first_failure_is_told(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with fleet_of(tmp_path, etcd_alone) as (fleet, stub):
        call = stub.Generate(text(), timeout=60)
        for _ in range(4):
            await call.read()
        serving = next(target.id for target in fleet.router.view.targets.values() if target.in_flight)
        kill(fleet, next(name for name in fleet.router.view.targets if name != serving))
        kill(fleet, serving)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await to_the_end(call)
        assert rpc.error_from(failed.value).reason == "ENGINE_DIED"
