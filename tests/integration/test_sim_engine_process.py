"""The simulated engine as a process: gangs that live and die as one, faults on demand, weight."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from stoker.node_agent.engine import ENGINES
from stoker.node_agent.engine.client import EngineClient
from stoker.node_agent.engine.protocol import Gang, Health, KvEndpoint
from stoker.node_agent.engine.stream import KvEventStream, Received
from stoker.sim_engine import gang
from stoker.sim_engine.config import GangConfig
from tests.support.engines import FAST, launch_request, running_engine, spawn, terminate, wait_serving
from tests.support.etcd import free_port
from tests.support.waiting import eventually

SIM = ENGINES["sim"]


@pytest.mark.parametrize("lost", ["head", "member"])
async def test_a_gang_serves_when_complete_and_ends_with_any_of_its_members(tmp_path: Path, lost: str) -> None:
    port = free_port()
    head, member, late = (launch_request(tmp_path, gang=Gang(rank, 3, "127.0.0.1", port)) for rank in range(3))
    processes = [await spawn(SIM, head), await spawn(SIM, member)]
    try:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, head.base_url)
            await eventually(lambda: _listens(port))
            assert await client.health(timeout_s=1) is Health.UNREACHABLE
            processes.append(await spawn(SIM, late))
            await wait_serving(client, processes[0], head, 20)
            assert all(process.returncode is None for process in processes)
        processes[0 if lost == "head" else 2].kill()
        async with asyncio.timeout(60):
            codes = [await process.wait() for process in processes]
        assert 0 not in codes
        assert "gone" in (member if lost == "head" else head).log_path.read_text()
    finally:
        await asyncio.gather(*(terminate(process) for process in processes))


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_it_stops_cleanly_on_sigterm(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=FAST) as engine:
        engine.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await engine.process.wait() == 0
        assert "Traceback" not in engine.log()


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/tokenize", "prompt")],
)
async def test_a_huge_prompt_keeps_no_health_check_waiting(tmp_path: Path, path: str, field: str) -> None:
    text = "Feed the fire, stoker. " * 100_000
    body = {"model": "tiny", field: [{"role": "user", "content": text}] if field == "messages" else text}
    async with running_engine("sim", tmp_path, args=FAST) as engine:
        asking = asyncio.create_task(_status(engine.session, engine.url + path, body))
        healthy = 0
        while not asking.done():
            assert await engine.client.health(timeout_s=1) is Health.SERVING, "as the router's own checks ask"
            healthy += 1
        assert await asking == (200 if path == "/tokenize" else 400)
        assert healthy > 5


async def _status(session: aiohttp.ClientSession, url: str, body: object) -> int:
    async with session.post(url, json=body) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        ("/no/such/model", (), "/no/such/model is no model directory"),
        (None, ("--sim-speed", "0"), "must be above 0"),
        (None, ("--block-size", "0"), "must be at least 1"),
    ],
)
async def test_a_wrong_command_line_says_what_is_wrong(
    tmp_path: Path, model: str | None, args: tuple[str, ...], words: str
) -> None:
    request = launch_request(tmp_path, model=Path(model) if model else None, args=args)
    process = await spawn(SIM, request)
    async with asyncio.timeout(60):
        assert await process.wait() != 0
    log = request.log_path.read_text()
    assert words in log
    assert "Traceback" not in log


async def test_embeddings_have_one_vector_an_input(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=FAST) as engine:
        body = {"model": engine.model, "input": ["one", "two", "one"]}
        async with engine.session.post(engine.url + "/v1/embeddings", json=body) as response:
            answer = await response.json()
    first, second, third = (item["embedding"] for item in answer["data"])
    assert first == third != second
    assert len(first) == len(second)
    assert answer["usage"]["prompt_tokens"] > 0


async def test_it_weighs_little(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=FAST) as engine:
        resident = _resident_kib(engine.process.pid)
        assert resident < 60 * 1024, f"{resident} KiB resident"


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


async def _ask(engine_url: str, session: aiohttp.ClientSession, max_tokens: int = 1) -> int:
    body = {"prompt": [300] * 65, "max_tokens": max_tokens}
    async with session.post(engine_url + "/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def test_it_crashes_when_told(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=[*FAST, "--sim-crash-after", "2"]) as engine:
        assert await _ask(engine.url, engine.session) == 200
        with pytest.raises(aiohttp.ClientError):
            await _ask(engine.url, engine.session)
        async with asyncio.timeout(60):
            assert await engine.process.wait() == 1


async def test_it_hangs_when_told_and_still_answers_health(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=[*FAST, "--sim-hang-after", "1"]) as engine:
        call = asyncio.create_task(_ask(engine.url, engine.session))
        await eventually(lambda: _waits(engine.client))
        assert await engine.client.health() is Health.SERVING
        assert not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def _waits(client: EngineClient) -> bool:
    return bool((await client.load()).waiting)


async def test_it_leaves_gaps_in_its_events_when_told(tmp_path: Path) -> None:
    async with running_engine("sim", tmp_path, args=[*FAST, "--sim-drop-events", "2"]) as engine:
        endpoint: KvEndpoint = engine.kv
        async with KvEventStream(endpoint, quiet_s=(0.05,)) as stream, asyncio.timeout(60):
            items = aiter(stream)
            for number in range(4):
                body = {"prompt": [300 + number] * 64, "max_tokens": 1}
                async with engine.session.post(engine.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
            received = [await anext(items) for _ in range(4)]
            assert [item.seq for item in received if isinstance(item, Received)] == [0, 1, 2, 3]
            assert stream.counts.replayed >= 2


async def test_a_silent_member_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "_DEAD_S", 0.2)
    port = free_port()
    head = gang.Head(GangConfig(2, 0, "127.0.0.1", port, headless=False))
    joining = asyncio.create_task(head.joined())
    await eventually(lambda: _listens(port))
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((1).to_bytes(4, "big"))
    async with asyncio.timeout(60):
        await joining
        with pytest.raises(gang.GangBroken, match="member 1 is gone"):
            await head.broken()
    writer.close()
    await head.close()
