"""The Connect protocol at the port for picks: what it says of what cannot be served, and its errors' two ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.api.router.v1 import router_pb2
from stoker.common import connect
from stoker.common.errors import Code, Exhausted, FieldViolation, InvalidRequest, StokerError
from stoker.router.config import LimitsConfig
from stoker.router.http.port import Connections
from stoker.router.picking.calls import PickCalls
from stoker.router.picking.connect import PREFIX
from stoker.router.picking.routes import PickRoutes, refused
from tests.support.lines import Line, Said, listening
from tests.support.picking import World, packed
from tests.support.waiting import eventually

PROMPT = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(64), max_tokens=8)
BODY = router_pb2.PickRequest(tokenized=PROMPT).SerializeToString()
MOST_BYTES = 64 * 1024


def error_of(said: Said) -> str:
    assert said.headers["content-type"] == connect.JSON
    return str(json.loads(said.body)["code"])


@dataclass
class Site:
    world: World
    shared: Connections
    number: int
    now: list[float]

    async def line(self, sends: bytes = b"") -> Line:
        return await Line.to(self.number, sends)

    async def ask(self, *lines: str, body: bytes = BODY, path: str = "Pick", method: str = "POST") -> Said:
        return await (await self.line(call(*lines, body=body, path=path, method=method))).answer()


def call(*lines: str, body: bytes = BODY, path: str = "Pick", method: str = "POST", kind: str = "proto") -> bytes:
    named = [line for line in lines if line]
    if not any(line.lower().startswith("content-type") for line in named):
        named.append(f"Content-Type: application/{kind}")
    head = [f"{method} {PREFIX}{path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *named]
    return "\r\n".join([*head, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def site(replicas: int = 3, most_bytes: int = MOST_BYTES) -> AsyncIterator[Site]:
    world, now = World(replicas, clock=time.monotonic), [0.0]
    routes = PickRoutes(world.router, PickCalls(world.router, world.picker), LimitsConfig())
    shared = Connections(routes.answer, most_bytes, 64, lambda: now[0], refused, 75.0)
    try:
        async with listening(shared) as number:
            yield Site(world, shared, number, now)
    finally:
        world.picks.close()
        assert world.idle()


async def test_a_call_gets_its_message() -> None:
    async with site() as here:
        said = await here.ask("Connect-Protocol-Version: 1", "Connect-Timeout-Ms: 1000", "Content-Encoding: identity")
        assert (said.status, said.headers["content-type"]) == (200, connect.PROTO)
        assert router_pb2.PickResponse.FromString(said.body).prompt_tokens == 64


async def test_a_media_type_may_have_parameters_and_any_case() -> None:
    body = b'{"tokenized": {"model": "tiny", "tokenIds": "AQAAAAIAAAA="}}'
    async with site() as here:
        for kind in ("application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
            said = await here.ask(f"Content-Type: {kind}", body=body)
            assert (said.status, said.headers["content-type"]) == (200, connect.JSON)
            assert json.loads(said.body)["promptTokens"] == 2


@pytest.mark.parametrize(
    ("lines", "status", "code", "answered"),
    [
        (("Content-Type: text/plain",), 415, "unimplemented", ("accept-post", "application/proto")),
        (("Content-Type: application/connect+proto",), 415, "unimplemented", ("accept-post", "application/json")),
        (("Content-Encoding: gzip",), 501, "unimplemented", ()),
        (("Connect-Protocol-Version: 2",), 400, "invalid_argument", ()),
        (("Connect-Timeout-Ms: soon",), 400, "invalid_argument", ()),
        (("Connect-Timeout-Ms: -1",), 400, "invalid_argument", ()),
        (("Connect-Timeout-Ms: 99999999999",), 400, "invalid_argument", ()),
        (("X-Stoker-Priority: 1e9",), 400, "invalid_argument", ()),
    ],
)
async def test_what_is_not_taken_is_named(
    lines: tuple[str, ...], status: int, code: str, answered: tuple[str, ...]
) -> None:
    async with site() as here:
        said = await here.ask(*lines)
        assert (said.status, error_of(said)) == (status, code)
        if answered:
            assert answered[1] in said.headers[answered[0]]
        assert here.world.idle()


async def test_what_is_not_served_is_named() -> None:
    async with site() as here:
        for path in ("Explode", "Pick/", "", "Explain", "Pick?x=1", "x" * 8000):
            said = await here.ask(path=path)
            assert (said.status, error_of(said)) == (404, "unimplemented"), path
        said = await here.ask(method="GET", body=b"")
        assert (said.status, error_of(said), said.headers["allow"]) == (405, "unimplemented", "POST")


@pytest.mark.parametrize("kind", ["proto", "json"])
async def test_bodies_that_are_no_messages_cost_their_own_call(kind: str) -> None:
    bodies = [BODY[:-3], b"\xff" * 64, b"{", b"[]", b'{"request": 7}', b"[" * 60_000, b'{"a":' * 9_000, b"\0"]
    async with site() as here:
        line = await here.line()
        for body in bodies:
            line.writer.write(call(body=body, kind=kind))
            said = await line.answer()
            assert (said.status, error_of(said)) == (400, "invalid_argument"), body[:20]
        line.writer.write(call())
        assert (await line.answer()).status == 200, "the connection still serves"


async def test_a_body_beyond_the_bound_is_refused_by_the_protocols_error() -> None:
    async with site() as here:
        line = await here.line(call(body=b"x" * (MOST_BYTES + 1))[:2000])
        said = await line.answer()
        assert (said.status, error_of(said)) == (400, "invalid_argument")
        assert "max_body_bytes" in json.loads(said.body)["message"]
        assert await line.ended()


async def test_who_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with site() as here:
        whole = call("Expect: 100-continue")
        for _ in range(2):
            line = await here.line(whole[: -len(BODY)])
            async with asyncio.timeout(5):
                assert await line.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            line.writer.write(BODY)
            assert (await line.answer()).status == 200
        refused_at_once = await here.line(call("Expect: 100-continue", body=b"x" * (MOST_BYTES + 1))[:200])
        assert (await refused_at_once.answer()).status == 400


async def test_giant_headers_are_refused() -> None:
    async with site() as here:
        line = await here.line(call(f"X: {'x' * 80_000}")[:66_000])
        assert (await line.answer()).status == 400
        assert await line.ended()


async def test_a_body_that_is_cut_off_is_never_called() -> None:
    async with site() as here:
        line = await here.line(call()[:-10])
        line.writer.close()
        await eventually(lambda: not here.shared.open, "it is gone")
        assert here.world.idle()


async def test_who_ends_in_the_middle_of_a_body_is_told() -> None:
    async with site() as here:
        line = await here.line(call()[:-10])
        line.writer.write_eof()
        said = await line.answer()
        assert (said.status, error_of(said)) == (400, "invalid_argument")
        assert await line.ended()


async def test_who_takes_too_long_over_a_body_is_told() -> None:
    async with site() as here:
        line = await here.line(call()[:-10])
        await eventually(lambda: any(each.began is not None for each in here.shared.open), "half of it is there")
        here.now[0] = 61.0
        here.shared.sweep()
        said = await line.answer()
        assert (said.status, error_of(said)) == (504, "deadline_exceeded")
        assert await line.ended()
        assert not here.shared.held_bytes


async def test_json_that_is_too_large_is_no_reason_to_come_back() -> None:
    async with site(most_bytes=1 << 22) as here:
        said = await (await here.line(call(body=b" " * (1 << 20) + b"{}", kind="json"))).answer()
        assert (said.status, error_of(said)) == (400, "invalid_argument")
        assert connect.error_from(said.status, said.body).reason == "BODY_TOO_LARGE"


async def test_pipelined_calls_are_answered_in_turn() -> None:
    async with site() as here:
        line = await here.line(call() + call(path="Explode") + call())
        assert [(await line.answer()).status for _ in range(3)] == [200, 404, 200]


async def test_who_sends_no_more_still_gets_its_answer() -> None:
    async with site() as here:
        line = await here.line(call("Connection: close"))
        line.writer.write_eof()
        assert (await line.answer()).status == 200


async def test_who_waits_and_gives_up_is_released_at_once() -> None:
    async with site(replicas=1) as here:
        big = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(10_000), max_tokens=8)
        await here.ask(body=router_pb2.PickRequest(tokenized=big).SerializeToString())
        line = await here.line(call())
        await eventually(lambda: len(here.world.router.turns) == 1, "it waits for room")
        line.writer.close()
        await eventually(lambda: not len(here.world.router.turns), "it waits no more")
        assert here.world.router.in_flight == len(here.world.picks) == 1


async def test_a_deadline_ends_a_wait() -> None:
    async with site(replicas=1) as here:
        big = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(10_000), max_tokens=8)
        await here.ask(body=router_pb2.PickRequest(tokenized=big).SerializeToString())
        said = await here.ask("Connect-Timeout-Ms: 50")
        assert (said.status, error_of(said)) == (504, "deadline_exceeded")
        assert here.world.router.in_flight == 1


async def test_who_asks_nothing_for_long_is_let_go_but_not_who_waits_for_an_answer() -> None:
    async with site(replicas=1) as here:
        silent, spoken = await here.line(), await here.line(call())
        assert (await spoken.answer()).status == 200
        big = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(10_000), max_tokens=8)
        await here.ask(body=router_pb2.PickRequest(tokenized=big).SerializeToString())
        waiting = await here.line(call())
        await eventually(lambda: len(here.world.router.turns) == 1, "it waits for room")
        here.now[0] = 74.0
        here.shared.sweep()
        assert len(here.shared.open) >= 3
        here.now[0] = 76.0
        here.shared.sweep()
        assert await silent.ended()
        assert await spoken.ended()
        assert len(here.world.router.turns) == 1
        here.world.picks.close()
        assert (await waiting.answer()).status == 200


# --- errors, both ends -----------------------------------------------------------------------------------------

ERRORS = st.builds(
    StokerError,
    st.text(min_size=1),
    reason=st.from_regex(r"[A-Z_]{1,20}", fullmatch=True),
    code=st.sampled_from(list(Code)),
    retry_after_s=st.none() | st.floats(0, 1e5).map(lambda s: round(s, 3)),
    fields=st.lists(st.builds(FieldViolation, st.text(), st.text()), max_size=3).map(tuple),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)


@given(ERRORS)
def test_an_error_arrives_as_it_was_raised(error: StokerError) -> None:
    arrived = connect.error_from(connect.status_of(error), connect.encoded(error))
    assert (arrived.message, arrived.reason, arrived.code) == (error.message, error.reason, error.code)
    assert (arrived.fields, arrived.metadata) == (error.fields if error.fields else (), error.metadata)
    assert arrived.retry_after_s == pytest.approx(error.retry_after_s)


@given(st.integers(100, 599), st.binary(max_size=200) | st.sampled_from([b"{}", b'{"code":7}', b'{"code":"?"}']))
def test_whatever_a_stranger_says_is_an_error(status: int, body: bytes) -> None:
    assert connect.error_from(status, body).message


def test_names_and_statuses_are_the_protocols() -> None:
    assert connect.status_of(InvalidRequest("x")) == 400
    assert connect.status_of(Exhausted("x")) == 429
    assert connect.status_of(StokerError("x", code=Code.FAILED_PRECONDITION)) == 400
    assert json.loads(connect.encoded(StokerError("x", code=Code.CANCELLED)))["code"] == "canceled"
    damaged = b'{"code":"unavailable","message":"m","details":[{"type":"google.rpc.ErrorInfo","value":"%%%"}]}'
    assert connect.error_from(503, damaged).code is Code.UNAVAILABLE
    assert connect.error_from(503, b"<html>").code is Code.UNAVAILABLE
    assert connect.error_from(404, b"<html>").code is Code.UNIMPLEMENTED
