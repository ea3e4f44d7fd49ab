"""Traces read, scaled and made: the same each time, in order, and wrong lines are named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import pytest

from stoker.bench.published import azure, mooncake
from stoker.bench.replicas import Job
from stoker.common.errors import InvalidRequest
from stoker.simulate.loads import GENERATORS, tenants
from stoker.simulate.traffic import Scale, scaled

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_azure_trace(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,100,1\n"
    jobs = list(azure(written(tmp_path / "a.csv", AZURE + rows)))
    assert jobs == [Job(0.0, (), 4808, 10, own_blocks=10), Job(1.5, (), 100, 1, own_blocks=1)]
    later = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2162,5\n"
    assert [job.at for job in azure(written(tmp_path / "b.csv", AZURE + later))] == [0.0, 1.0]


def test_a_mooncake_prompts(tmp_path: Path) -> None:
    rows = '{"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 7, 9]}\n'
    (job,) = mooncake(written(tmp_path / "m.jsonl", rows))
    assert (job.at, job.prompt_tokens, job.output_tokens, len(set(job.keys)), job.own_blocks) == (0.5, 1100, 6, 3, 0)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (azure, "", "t:1: the header is not TIMESTAMP,ContextTokens,GeneratedTokens; --format mooncake"),
        (azure, AZURE + "2023-11-16 18:17:03.9,1,1\nnow,1,1\n", "t:3: 'now,1,1' is no request"),
        (azure, AZURE + "2023-11-16 18:17:03.9,1\n", "t:2: '2023-11-16 18:17:03.9,1' is no request"),
        (azure, AZURE + "2023-11-16 18:17:03.9,1,1\n2023-11-16 18:17:02.9,1,1\n", "t:3: it goes back in time; sort"),
        (
            azure,
            AZURE + "2023-11-16 18:17:03.9,-1,1\n",
            "t:2: it has -1 tokens; 0 to 10,000,000 can be; cut or mend it",
        ),
        (azure, AZURE + "2023-11-16 18:17:03.9,1,99999999999999999999\n", "t:2: it has 1e+20 tokens"),
        (azure, AZURE + "2023-11-16 18:17:03.9,1,1\n9999-11-16 18:17:03.9,1,1\n", "t:3: it comes 2,913,"),
        (azure, AZURE + '2023-11-16 18:17:03.9,1,1\n"' + "x" * 200_000, "t:3: it is no CSV (field larger"),
        (azure, "x" * 200_000, "t:1: it is no CSV"),
        (mooncake, "[" * 100_000, "t:1: it is no Mooncake request"),
        (
            mooncake,
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "t:1: it is no Moonc",
        ),
        (mooncake, "{}\n", "t:1: it is no Mooncake request"),
        (
            mooncake,
            '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}',
            "t:1: it comes nan days",
        ),
        (
            mooncake,
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
            "t:1: it is no Moonc",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_what_to_do(
    tmp_path: Path, read: Callable[[Path], object], text: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        list(read(written(tmp_path / "t", text)))  # type: ignore[call-overload]
    assert said in raised.value.message


def test_what_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    with pytest.raises(InvalidRequest) as raised:
        list(azure(file))
    assert "t:2: '\\\\xff" in raised.value.message


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        list(azure(Path("/nowhere/at/all")))


def three() -> list[Job]:
    return [Job(0.0, (1, 2), 1_024), Job(10.0, (1, 3), 1_024), Job(20.0, (4,), 512)]


def test_faster_and_for_longer() -> None:
    jobs = list(scaled(lambda: iter(three()), Scale(speed=2.0, hours=1 / 100), 1)())
    assert [job.at for job in jobs][:4] == [0.0, 5.0, 10.0, pytest.approx(10.0 + 20 / 3 / 2)]
    assert jobs[-1].at < 36.0 <= jobs[-1].at + 6.7
    assert jobs[0].keys == (1, 2)
    assert jobs[3].keys != (1, 2), "other users the next time"
    assert jobs[3].keys[0] == jobs[4].keys[0], "who share among themselves what those before them shared"


def test_more_of_the_same() -> None:
    def made(seed: int) -> list[Job]:
        return list(scaled(lambda: iter(three()), Scale(load=2.5), seed)())

    jobs = made(7)
    assert jobs == made(7)
    assert 6 <= len(jobs) <= 9
    assert all(before.at <= after.at for before, after in pairwise(jobs))
    assert sum(job.keys[0] == 1 for job in jobs) == 2, "copies share nothing with what they are copies of"


@pytest.mark.parametrize("name", GENERATORS)
def test_loads_follow_from_their_seed(name: str) -> None:
    jobs, again, other = (list(islice(GENERATORS[name](seed), 1_000)) for seed in (3, 3, 4))
    assert jobs == again
    assert jobs != other
    assert all(before.at <= after.at for before, after in pairwise(jobs))
    assert all(job.prompt_tokens >= 512 * len(job.keys) and job.own_blocks >= 0 for job in jobs)


def test_a_step_has_twice_the_requests() -> None:
    jobs = list(GENERATORS["step"](1))
    low = sum(job.at < 600.0 for job in jobs)
    high = sum(600.0 <= job.at < 1_200.0 for job in jobs)
    assert high == pytest.approx(2 * low, rel=0.1)


def test_half_of_the_tenants_fall_silent() -> None:
    jobs = list(tenants(1))
    before = {job.tenant for job in jobs if job.at < 900.0}
    after = {job.tenant for job in jobs if job.at >= 1_000.0}
    assert len(before) == 90
    assert len(after) == pytest.approx(45, abs=3)
