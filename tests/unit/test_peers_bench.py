"""The comparison with other routers: what is asked, what is counted, what the table says."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from bench.peers.__main__ import chosen, options
from bench.peers.catalog import PEERS
from bench.peers.quality import Contender, Standing, mark
from bench.peers.report import Report
from bench.peers.speed import Speed
from bench.peers.speed_client import Fresh, Job, answer_end, prompts, read, requests
from bench.peers.static import Connection, responses
from stoker.bench import workloads
from stoker.bench.stats import Sample, figures


@pytest.mark.parametrize("workload", sorted(workloads.WORKLOADS))
def test_runs_differ_from_the_first_word_and_in_nothing_else(workload: str) -> None:
    plain = workloads.WORKLOADS[workload](3)
    one, other = mark(plain, "one"), mark(plain, "other")
    assert mark(plain, "one") == one

    def text(prompt: workloads.Prompt) -> str:
        return prompt.text or " ".join(content for _, content in prompt.messages)

    heads = {tuple(text(prompt).split()[:8]) for prompt in one}
    assert len(heads) == 1
    assert heads != {tuple(text(prompt).split()[:8]) for prompt in other}
    assert [text(prompt).split()[8:] for prompt in one] == [text(prompt).split() for prompt in plain]
    assert [prompt.after for prompt in one] == [prompt.after for prompt in plain]


def test_a_marked_turn_still_repeats_all_before_it() -> None:
    for prompt in (marked := mark(workloads.chat(1), "x")):
        if prompt.after >= 0:
            before = marked[prompt.after].messages
            assert prompt.messages[: len(before)] == before


def test_peers_are_chosen_by_part_of_their_name() -> None:
    assert {peer.name for peer in chosen(["smg"])} == {"smg cache_aware", "smg prefix_hash"}
    assert chosen([]) == list(PEERS)
    assert chosen(["none"]) == []
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_a_peer_that_does_not_exist_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["--peer", "smg", "--peer", "nobody"])
    assert "'nobody'" in capsys.readouterr().err


def test_speed_prompts_share_what_they_claim() -> None:
    made = prompts(1, 2_000)
    assert {len(prompt) for prompt in made} == {2_000}
    assert len({prompt[:1_500] for prompt in made}) == 16
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", 40),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na", None),
        (b"HTTP/1.1 200 OK\r\nContent-Le", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 59),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", None),
    ],
)
def test_the_client_knows_where_an_answer_ends(answer: bytes, end: int | None) -> None:
    assert answer_end(answer) == end


@asynccontextmanager
async def static_engine() -> AsyncIterator[str]:
    answers = responses("/model")
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


JOB = Job("", "/v1/completions", "tiny", prompt_bytes=100_000, clients=4, seconds=0.2)


async def test_a_reading_counts_good_answers() -> None:
    async with static_engine() as url:
        got = await read(replace(JOB, url=url))
    assert got.errors == 0
    assert got.requests_per_s > 0
    assert 0 < got.p50_ms <= got.p99_ms


async def test_a_reading_counts_refusals_as_errors_only() -> None:
    async with static_engine() as url:
        got = await read(replace(JOB, url=url, path="/v1/nowhere"))
    assert got.errors > 0
    assert got.requests_per_s == 0


async def test_a_server_that_hangs_up_is_an_error() -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        got = await read(replace(JOB, url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert got.errors == JOB.clients
    assert got.requests_per_s == 0


def test_token_ids_stand_for_the_text_they_replace() -> None:
    (first, *_) = requests(replace(JOB, url="http://h:1", path="/select", token_ids=True, prompt_bytes=2_000))
    assert first.startswith(b"POST /select HTTP/1.1\r\nhost: h:1\r\n")
    assert first.count(b",") == 500


def standing(name: str, ttft_s: float, *, error: str = "", failure: str = "") -> Standing:
    sample = Sample("http", 0.0, ttft_s=ttft_s, total_s=ttft_s, error=error)
    return Standing(Contender(name, ""), [figures(name, [sample], 1.0, 0.5)], failure)


def shown(report: Report) -> list[str]:
    written = io.StringIO()
    Console(width=200, file=written, color_system="standard", force_terminal=True).print(report.table())
    return written.getvalue().splitlines()


def test_the_best_is_marked_among_those_without_errors() -> None:
    report = Report({})
    report.quality["shared"] = [
        standing("slow", 0.2),
        standing("quick but failing", 0.1, error="http_503"),
        standing("gone", 0.01, failure="ended"),
    ]
    rows = {name: next(row for row in shown(report) if name in row) for name in ("slow", "quick", "gone")}
    assert "\x1b[1m200 ms" in rows["slow"]
    assert "\x1b[1m" not in rows["quick"]
    assert "\x1b[1m" not in rows["gone"]
    assert "ended" in rows["gone"]


def test_what_did_not_run_is_a_row_with_its_reason() -> None:
    report = Report({}, not_run={"peer x": "no wheel for this machine"})
    report.quality["shared"] = [standing("stoker", 0.2)]
    report.speed = [
        Speed("stoker", 2_000, 10.0, 2.0, 1.0, 50.0, 0, "a note is no reason not to be ranked"),
        Speed("decider", 2_000, 99.0, 0.1, 0.1, 50.0, 0, "relays not", ranked=False),
    ]
    rows = [row for row in shown(report) if "peer x" in row]
    assert len(rows) == 2
    assert all("not run: no wheel for this machine" in row for row in rows)
    assert "\x1b[1m" not in next(row for row in shown(report) if "decider" in row)
    value = report.value()
    assert value["not_run"] == {"peer x": "no wheel for this machine"}
    assert value["speed"][0]["requests_per_s"] == 10.0
    assert value["quality"]["shared"][0]["hit_rate"] == 0.5


def test_fresh_requests_are_whole_never_alike_and_end_alike() -> None:
    job = Job("http://127.0.0.1:1", "/v1/completions", "tiny", 2_000, 1, 1.0, fresh=True)
    pool = requests(job)
    fresh = Fresh(pool)
    seen = [fresh[number % len(pool)] for number in range(3 * len(pool))]
    assert len(set(seen)) == len(seen)
    for request, plain in zip(seen, pool, strict=False):
        assert len(request) == len(plain)
        head, _, body = request.partition(b"\r\n\r\n")
        prompt, before = json.loads(body)["prompt"], json.loads(plain.partition(b"\r\n\r\n")[2])["prompt"]
        assert (len(body), head) == (int(head.rpartition(b" ")[2]), plain.partition(b"\r\n\r\n")[0])
        assert prompt[:1500] == before[:1500], "the shared part is the same"
        assert prompt != before
