"""The router's OpenAI API before simulated engines: what a client sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import openai
import pytest
import pytest_asyncio

from stoker.api.registry.v1 import records_pb2
from stoker.bench.recordings import Replays, Wanted, recorded
from stoker.local.model import cached
from stoker.router.app import RouterApp
from tests.support.engines import FAST, TINY, RunningEngine, running_engine
from tests.support.router import replica, running_router, tell, tokenizer_of
from tests.support.waiting import eventually

SLOW = ("--sim-step-ms", "50")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_gauge",
        "description": "Reads a gauge.",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    },
}
NAMED: Any = {"type": "function", "function": {"name": "read_gauge"}}
# A structured-field item: a token with parameters.
DECISION = r"[a-z_]+(;hit=\d+;prompt=\d+)?(;cost_ms=-?\d+\.\d)?;candidates=\d+;waited_ms=\d+;attempt=\d+"
GREEDY = {"model": "tiny", "temperature": 0}


@dataclass
class Stack:
    app: RouterApp
    engines: dict[str, RunningEngine]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.http_port}"

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Mapping[str, str], bytes]:
        async with self.http.post(self.url + path, json=body, **kwargs) as answer:
            return answer.status, answer.headers, await answer.read()

    async def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def replicas(self) -> list[records_pb2.Replica]:
        sha256, _ = tokenizer_of(cached(TINY))
        return [replica(name, engine.url, sha256=sha256) for name, engine in self.engines.items()]


@contextlib.asynccontextmanager
async def stack(folder: Path, *settings: str, count: int = 1, args: tuple[str, ...] = FAST) -> AsyncIterator[Stack]:
    async with contextlib.AsyncExitStack() as held:
        engines = await asyncio.gather(
            *(held.enter_async_context(running_engine("sim", folder, args=args)) for _ in range(count))
        )
        app = await held.enter_async_context(running_router(*settings))
        http = await held.enter_async_context(aiohttp.ClientSession())
        app.tokenizers.add(*tokenizer_of(cached(TINY)))
        running = Stack(app, {f"tiny-{index}": engine for index, engine in enumerate(engines)}, http)
        tell(app, *running.replicas())
        await eventually(lambda: all(t.parity == "ok" for t in app.view.targets.values()), "parity of all engines")
        yield running


def normal(body: bytes) -> bytes:
    """Without what differs between two runs of the same request."""
    body = re.sub(rb'"(id|item_id|response_id)":\s*"[^"]*"', rb'"\1":""', body)
    body = re.sub(
        rb'"cached_tokens":\s*\d+', b'"cached_tokens":0', body
    )  # the second run finds the first one's blocks
    return re.sub(rb'"(created|created_at|completed_at)":\s*[\d.]+', rb'"\1":0', body)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Feed the fire, stoker."}], "max_tokens": 6}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "chat stream": ("/v1/chat/completions", {**CHAT, "temperature": 0, "stream": True}),
    "tools": (
        "/v1/chat/completions",
        {**CHAT, "temperature": 0, "tools": [TOOL], "tool_choice": NAMED},
    ),
    "completion": ("/v1/completions", {**GREEDY, "prompt": "Feed the fire", "max_tokens": 6}),
    "completion stream": (
        "/v1/completions",
        {
            "model": "tiny", "prompt": "Feed the fire", "max_tokens": 6, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "token ids": ("/v1/completions", {**GREEDY, "prompt": [5, 6, 7, 8], "max_tokens": 3}),
    "several": ("/v1/completions", {**GREEDY, "prompt": ["a b", "c d"], "max_tokens": 3}),
    "responses": ("/v1/responses", {**GREEDY, "input": "Feed the fire", "max_output_tokens": 6}),
    "responses stream": (
        "/v1/responses",
        {"model": "tiny", "input": "Feed the fire", "max_output_tokens": 6, "temperature": 0, "stream": True},
    ),
    "embeddings": ("/v1/embeddings", {"model": "tiny", "input": ["Feed the fire", "and the boiler"]}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "Feed the fire"}),
    "engine's refusal": ("/v1/completions", {"model": "tiny", "prompt": "x", "temperature": -1}),
}  # fmt: skip


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with stack(tmp_path_factory.mktemp("one")) as running:
        yield running


async def test_every_route_gives_what_the_engine_gives_byte_for_byte_and_is_counted(one: Stack) -> None:
    engine = one.engines["tiny-0"]
    for name, (path, body) in BODIES.items():
        async with one.http.post(engine.url + path, json=body) as direct:
            wanted = direct.status, direct.content_type, normal(await direct.read())
        status, headers, got = await one.post(path, body)
        assert (status, headers["Content-Type"].split(";")[0], normal(got)) == wanted, name
        assert headers["x-stoker-replica"] == "tiny-0", name
        assert re.fullmatch(DECISION, headers["x-stoker-decision"]), name
        decided = one.app.router.recent.of(headers["x-request-id"])
        assert decided is not None, name
        source = "none" if path == "/tokenize" else "tokens"  # which computes nothing worth finding again
        assert decided.source == source, f"{name} was hashed over {decided.source}: {decided.why}"
        await eventually(lambda: one.app.view.targets["tiny-0"].in_flight == 0, f"{name} released")
    pool = one.app.view.pools["tiny"]
    assert pool.fleet.load.in_flight == 0
    assert one.app.router.in_flight == 0


async def test_what_is_recorded_can_be_replayed_and_holds_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with stack(tmp_path, f"record.path={path}", count=2) as running:
        for number in range(12):
            body = {
                **GREEDY,
                "prompt": f"Rake the ashes {number % 3} " * 40,
                "max_tokens": 4,
                "stream": number % 2 == 0,
            }
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            status, _, _ = await running.post("/v1/completions", body, headers={"x-stoker-tenant": "acme"})
            assert status == 200
    text = path.read_bytes()
    assert b"ashes" not in text
    assert b"acme" not in text
    recording = recorded([path], "", Wanted(prefill_rate=1_000.0))
    assert len(recording.jobs) == 12
    assert len(recording.replicas) == 2
    assert set(recording.placed) <= running.engines.keys()
    assert recording.hardware.kv_blocks == 300
    assert recording.told is not None
    assert recording.told.ttft_p50_ms, "of the streams"
    assert recording.told.hit_rate, "as the engines say"
    replayed = Replays(recording, 1).run("stoker", recording.config)
    assert replayed.requests == 12
    assert replayed.hit_rate


async def test_tokens_are_those_the_engine_counts(one: Stack) -> None:
    for name in ("chat", "tools", "completion", "responses", "embeddings"):
        path, body = BODIES[name]
        _, headers, got = await one.post(path, body)
        usage = json.loads(got)["usage"]
        decided = one.app.router.recent.of(headers["x-request-id"])
        assert decided is not None
        assert decided.tokens == usage.get("prompt_tokens", usage.get("input_tokens")), name


async def test_unknown_fields_reach_the_engine(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def engine(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        seen.append(await request.read())
        return aiohttp.web.Response(body=b'{"odd":  [1,2 ]}', content_type="application/json")

    server = aiohttp.web.Server(engine)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    raw = b'{ "model":"odd","prompt" : "hi", "from_the_future": {"a":[1, 2]} }'
    async with running_router("parity=false") as app, aiohttp.ClientSession() as http:
        tell(app, replica("odd-0", url, models=("odd",)))
        async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", data=raw) as answer:
            assert await answer.read() == b'{"odd":  [1,2 ]}'
    assert raw in seen
    listener.close()
    await server.shutdown(1)


@pytest.mark.parametrize(
    ("path", "raw", "status", "param", "says"),
    [
        ("/v1/completions", b"{not json", 400, "body", "no valid JSON"),
        ("/v1/completions", b"[1]", 400, "body", "JSON object"),
        ("/v1/completions", b'{"prompt":"x"}', 400, "model", "name the model"),
        ("/v1/completions", b'{"model":"tiny"}', 400, "prompt", "give a text"),
        ("/v1/chat/completions", b'{"model":"tiny","messages":[]}', 400, "messages", "at least one"),
        ("/v1/chat/completions", b'{"model":"tiny","messages":["x"]}', 400, "messages", "object"),
        ("/v1/responses", b'{"model":"tiny"}', 400, "input", "give a text"),
        ("/v1/embeddings", b'{"model":"tiny"}', 400, "input", "give a text"),
        ("/v1/completions", b'{"model":"nope","prompt":"x"}', 404, None, "`nope` does not exist"),
        ("/v1/completions", b'{"model":"tiny","prompt":"x","max_tokens":99999}', 400, "max_tokens", "max_model_len="),
        ("/v1/completions", b'{"model":"tiny","prompt":"' + b"ab " * 30_000 + b'"}', 400, "input_tokens", "16384 "),
        ("/v1/completions", b'{"model":"tiny","prompt":"x","n":1%s}' % (b"0" * 30), 400, None, "n must be at most"),
        ("/v1/completions", b'{"model":"tiny","prompt":"x","logprobs":1%s}' % (b"0" * 30), 400, "logprobs", "to 20"),
        ("/v1/completions", b'{"model":"tiny","prompt":"x","o":%s}' % (b"[" * 975 + b"]" * 975), 400, "body", "JSON"),
        ("/v1/nothing", b"{}", 404, None, "/v1/chat/completions"),
    ],
)  # fmt: skip
async def test_bad_requests_get_openai_errors_that_name_the_field(
    one: Stack, path: str, raw: bytes, status: int, param: str | None, says: str
) -> None:
    async with one.http.post(one.url + path, data=raw) as answer:
        body = json.loads(await answer.read())
    assert answer.status == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert says in body["error"]["message"]
    assert one.app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_a_client_that_waits_for_leave_to_send_gets_it(one: Stack) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    async with asyncio.timeout(10):
        status, _, got = await one.post("/v1/completions", body, expect100=True)
    assert status == 200
    assert json.loads(got)["usage"]["completion_tokens"] == 2


async def test_health_answers_head_as_load_balancers_ask(one: Stack) -> None:
    for path in ("/health", "/ready"):
        async with one.http.head(one.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_a_body_beyond_the_bound_is_refused_with_413(tmp_path: Path) -> None:
    async with stack(tmp_path, "limits.max_body_bytes=5000") as running:
        for data in (b"x" * 6000, _pieces()):
            async with running.http.post(f"{running.url}/v1/completions", data=data) as answer:
                assert answer.status == 413
                assert "limits.max_body_bytes" in (await answer.json())["error"]["message"]


async def _pieces() -> AsyncIterator[bytes]:
    for _ in range(6):
        yield b"x" * 1000


async def test_models_are_listed_and_described(one: Stack) -> None:
    client = await one.client()
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_the_openai_client_works_unmodified(one: Stack) -> None:
    client = await one.client()
    messages: Any = [{"role": "user", "content": "Feed the fire."}]
    chat = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, n=2, temperature=1)
    assert len(chat.choices) == 2
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    shown = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert shown.choices[0].logprobs is not None
    assert shown.choices[0].logprobs.content is not None
    assert len(shown.choices[0].logprobs.content) == 3
    called = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=64, tools=[TOOL],
        tool_choice=NAMED,
    )  # fmt: skip
    assert called.choices[0].message.tool_calls
    schema: Any = {"type": "object", "properties": {"heat": {"type": "integer"}}, "required": ["heat"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "heat", "schema": schema}}
    shaped = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=64,
        response_format=form,
    )  # fmt: skip
    assert "heat" in json.loads(shaped.choices[0].message.content or "")
    response = await client.responses.create(model="tiny", input="Feed the fire.", max_output_tokens=5)
    assert response.status in ("completed", "incomplete")
    embedded = await client.embeddings.create(model="tiny", input=["a", "b"])
    assert len(embedded.data) == 2
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=messages)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="tiny", prompt="x", max_tokens=100_000)
    assert refused.value.param == "max_tokens"


async def running_in(engine: RunningEngine) -> int:
    load = await engine.client.load()
    return (load.running or 0) + (load.waiting or 0)


async def leave(engine: RunningEngine, asking: asyncio.Task[Any]) -> None:
    """Go once the engine works on the request; it has to stop long before its end."""

    async def idle() -> bool:
        return not await running_in(engine)

    await eventually(lambda: running_in(engine), "the engine works on it")
    asking.cancel()
    await eventually(idle, "the engine works on nothing", 10.0)
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_stops_the_work_in_the_engine(tmp_path: Path, stream: bool) -> None:
    async with stack(tmp_path, args=SLOW) as running:
        engine = running.engines["tiny-0"]
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": stream}
        asking = asyncio.create_task(running.post("/v1/completions", body))
        await leave(engine, asking)
        await eventually(lambda: running.app.view.pools["tiny"].fleet.load.in_flight == 0, "flight released")


async def test_a_client_that_goes_during_prefill_frees_the_engine(tmp_path: Path) -> None:
    async with stack(
        tmp_path, args=("--sim-prefill-tokens-per-s", "200", "--max-num-batched-tokens", "64")
    ) as running:
        engine = running.engines["tiny-0"]
        body = {"model": "tiny", "prompt": "coal " * 4000, "max_tokens": 5, "stream": True}
        asking = asyncio.create_task(running.post("/v1/completions", body))
        await leave(engine, asking)


async def test_time_runs_out_as_the_caller_asked(tmp_path: Path) -> None:
    async with stack(tmp_path, args=SLOW) as running:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 5000, "ignore_eos": True}
        status, _, got = await running.post("/v1/completions", body, headers={"x-request-timeout": "0.3"})
        assert status == 504
        assert json.loads(got)["error"]["code"] == "deadline_exceeded"
        status, _, got = await running.post("/v1/completions", body, headers={"x-request-timeout": "soon"})
        assert status == 400
        assert json.loads(got)["error"]["param"] == "x-request-timeout"


async def test_two_replicas_share_and_a_prefix_returns_to_its_own(tmp_path: Path) -> None:
    async with stack(tmp_path, count=2) as running:
        homes: dict[int, set[str]] = {}
        for turn in range(3):
            for family in range(8):
                text = f"family {family} " * 60 + f"turn {turn}"
                _, headers, _ = await running.post(
                    "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 1}
                )
                homes.setdefault(family, set()).add(headers["x-stoker-replica"])
        assert all(len(home) == 1 for home in homes.values()), homes
        assert set.union(*homes.values()) == {"tiny-0", "tiny-1"}


async def test_round_robin_by_header_only_where_allowed(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 1}
    wanted = {"x-stoker-policy": "round_robin"}
    async with stack(tmp_path, "allow_policy_header=true", count=2) as running:
        seen = [(await running.post("/v1/completions", body, headers=wanted))[1] for _ in range(4)]
        assert [headers["x-stoker-replica"] for headers in seen] == ["tiny-0", "tiny-1"] * 2
        assert {headers["x-stoker-decision"].split(";")[0] for headers in seen} == {"round_robin"}
        tell_not = await running.post("/v1/completions", body, headers={"x-stoker-policy": "best"})
        assert tell_not[0] == 400
    async with stack(tmp_path) as running:
        status, _, got = await running.post("/v1/completions", body, headers=wanted)
        assert status == 400
        assert json.loads(got)["error"]["param"] == "x-stoker-policy"


async def test_before_the_first_snapshot_it_is_not_ready() -> None:
    async with running_router() as app, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{app.http_port}"
        async with http.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"}) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "not_ready"
        async with http.get(f"{url}/ready") as answer:
            assert answer.status == 503
        tell(app)
        async with http.get(f"{url}/ready") as answer:
            assert answer.status == 200


async def test_without_a_tokenizer_requests_still_go_home_by_their_bytes(tmp_path: Path) -> None:
    async with stack(tmp_path) as one:
        record = one.replicas()[0]
        record.engine.tokenizer_sha256 = "f" * 64
        tell(one.app, record)
        status, headers, _ = await one.post(
            "/v1/completions", {"model": "tiny", "prompt": "coal " * 200, "max_tokens": 1}
        )
        assert status == 200
        decided = one.app.router.recent.of(headers["x-request-id"])
        assert decided is not None
        assert (decided.source, decided.why) == ("bytes", "no_tokenizer")
        assert decided.blocks


async def test_another_tokenizer_is_found_out_and_earns_no_credit(tmp_path: Path) -> None:
    async with stack(tmp_path) as running:
        _, tokenizer = tokenizer_of(cached(TINY))

        class Other:
            max_chars_per_token = 64

            def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> list[int]:
                return [*tokenizer.encode(text, add_special_tokens=add_special_tokens)[:-1], 7]

            render = staticmethod(tokenizer.render)

        running.app.tokenizers.add("other", Other())  # type: ignore[arg-type]
        record = running.replicas()[0]
        record.engine.tokenizer_sha256, record.epoch = "other", 2
        tell(running.app, record)
        target = running.app.view.targets["tiny-0"]
        await eventually(lambda: target.parity.startswith("completion: token"), "the probe's verdict")
        assert running.app.view.pools["tiny"].fleet.replicas["tiny-0"].block_size == 0
        status, _, _ = await running.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
        assert status == 200, "still usable by load"


async def test_stop_drains_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as held:
        running = await held.enter_async_context(stack(tmp_path, args=SLOW))
        body = {"model": "tiny", "prompt": "x", "max_tokens": 10, "ignore_eos": True, "stream": True}
        asking = asyncio.create_task(running.post("/v1/completions", body))
        await eventually(lambda: running.app.view.targets["tiny-0"].in_flight == 1, "the request is on its way")
        running.app.router.draining = True
        status, headers, _ = await running.post("/v1/completions", body)
        assert status == 503
        assert headers["Retry-After"]
        status, _, got = await asking
        assert status == 200
        assert got.endswith(b"data: [DONE]\n\n")


async def test_no_answer_from_a_stopped_engine_ends_by_the_deadline(tmp_path: Path) -> None:
    async with stack(tmp_path, "limits.first_byte_s=0.5") as running:
        process = running.engines["tiny-0"].process
        process.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                status, _, got = await running.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        finally:
            process.send_signal(signal.SIGCONT)
        assert status == 504
        assert "tiny-0" in json.loads(got)["error"]["message"]
