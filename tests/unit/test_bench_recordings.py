"""Replays of recorded decisions: the same figures each time, and what a recording does not say has to be said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from stoker.bench.published import mooncake_prompts
from stoker.bench.recordings import Recording, Replays, Wanted, mooncake, recorded
from stoker.bench.replay import Hardware, Job
from stoker.bench.replay import replay as replay_jobs
from stoker.cli.bench_replay import _changed
from stoker.common.errors import InvalidRequest, NotFound
from stoker.router.core import Decision, RoutingConfig
from stoker.router.decisions.records import Record, encoded, packed


def records(seed: int = 5, count: int = 240) -> list[Record]:
    """Twelve prefixes of 40 blocks with tails of their own, recorded under round-robin over three replicas."""
    rng = Random(seed)
    families = [[rng.getrandbits(64) for _ in range(40)] for _ in range(12)]
    made, at = [], 1_700_000_000.0
    for number in range(count):
        keys = families[rng.randrange(12)] + [rng.getrandbits(64) for _ in range(4)]
        at += rng.expovariate(2.0)
        made.append(
            Record(
                round(at, 6),
                "tiny",
                f"tiny-{number % 3}",
                "round_robin",
                32 * len(keys) + 7,
                32,
                keys=packed(keys),
                policy="round_robin",
                output_tokens=256,
                candidates=3,
                ttft_s=0.5,
                took_s=0.5 + 7 * 0.02,
                cached_tokens=320,
                generated_tokens=8,
                kv_blocks=300,
                prefill_rate=2_000.0,
                tenant=f"t{number % 2}",
            )
        )
    return made


def written(path: Path, some: list[Record]) -> Path:
    path.write_bytes(b"".join(map(encoded, some)))
    return path


def figures(recording: Recording, policy: str) -> tuple[object, ...]:
    found = Replays(recording, seed=1).run(policy, recording.config)
    return found.requests, found.hit_rate, found.ttft_p50_ms, found.ttft_p99_ms, found.requests_per_s, found.moved


def test_a_replay_is_golden(tmp_path: Path) -> None:
    recording = recorded([written(tmp_path / "d", records())], "", Wanted())
    assert recording.replicas == ("tiny-0", "tiny-1", "tiny-2")
    assert recording.hardware == Hardware(32, 300, 2_000.0, 0.005, decode_s=0.02, batching=True)
    assert recording.told is not None
    assert (recording.told.hit_rate, recording.told.ttft_p50_ms, recording.told.requests) == (0.2273, 500.0, 240)
    assert {policy: figures(recording, policy) for policy in ("round_robin", "stoker")} == GOLDEN
    assert figures(recording, "stoker") == GOLDEN["stoker"], "again, the same"


# Requests, hit rate, TTFT p50 and p99 (ms), requests/s, moved.
GOLDEN = {
    "round_robin": (240, 0.4595, 429.8, 1159.3, 2.221, 0),
    "stoker": (240, 0.8636, 72.5, 712.5, 2.236, 161),
}


def test_who_goes_elsewhere_is_counted(tmp_path: Path) -> None:
    """Recorded from a replay of itself: under the same policy nobody moves, under the other two thirds do."""
    plain = recorded([written(tmp_path / "d", records())], "", Wanted())
    numbers = {id(job): number for number, job in enumerate(plain.jobs)}
    went: dict[int, str] = {}

    def note(job: Job, decision: Decision) -> None:
        went[numbers[id(job)]] = decision.replica

    replay_jobs(plain.jobs, replicas=plain.replicas, hardware=plain.hardware, config=plain.config, sent=note)
    placed = [went[number] for number in range(len(went))]
    again = replace(plain, placed=placed)
    assert figures(again, "stoker")[-1] == 0
    moved = figures(again, "round_robin")[-1]
    assert isinstance(moved, int)
    assert 120 < moved < 200


def test_other_settings_give_other_figures_and_the_rest_stays(tmp_path: Path) -> None:
    recording = recorded([written(tmp_path / "d", records())], "", Wanted())
    replays = Replays(recording, seed=1)
    changed = replace(recording.config, **_changed(("routing.floor_tokens=100", "routing.epsilon=0.01")))
    assert (changed.floor_tokens, changed.epsilon) == (100.0, 0.01)
    assert replace(changed, floor_tokens=40_960.0, epsilon=1.0) == RoutingConfig()
    tight = replays.run("stoker", changed, "tight")
    assert tight.settings == "tight"
    assert tight.hit_rate != replays.run("stoker", recording.config).hit_rate


def test_rotated_files_are_read_together_and_retries_are_no_arrivals(tmp_path: Path) -> None:
    made = records(count=60)
    made[10] = replace_record(made[10], attempt=2)
    old, new = written(tmp_path / "d.1", made[:30]), written(tmp_path / "d", made[30:])
    recording = recorded([new, old], "", Wanted(requests=40, speed=2.0))
    assert len(recording.jobs) == 40
    assert recording.jobs[-1].at == pytest.approx((made[40].at - made[0].at) / 2)
    assert [job.at for job in recording.jobs] == sorted(job.at for job in recording.jobs)
    assert {job.tenant for job in recording.jobs} == {"t0", "t1"}


def replace_record(record: Record, **changes: object) -> Record:
    return msgspec.structs.replace(record, **changes)


def test_what_is_not_recorded_has_to_be_said(tmp_path: Path) -> None:
    silent = [replace_record(each, kv_blocks=0, prefill_rate=None) for each in records(count=20)]
    path = written(tmp_path / "d", silent)
    with pytest.raises(InvalidRequest, match="--kv-blocks"):
        recorded([path], "", Wanted())
    with pytest.raises(InvalidRequest, match="--prefill-rate"):
        recorded([path], "", Wanted(kv_blocks=100))
    assert recorded([path], "", Wanted(kv_blocks=100, prefill_rate=1e3)).hardware.kv_blocks == 100


def test_mistakes_are_told_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "d", records(count=2))
    with path.open("ab") as more:
        more.write(b'{"at": 1}\n')
    with pytest.raises(InvalidRequest, match="line 3 is no record"):
        recorded([path], "", Wanted())
    with pytest.raises(InvalidRequest, match="cannot read"):
        recorded([tmp_path / "none"], "", Wanted())
    with pytest.raises(NotFound, match="no decision"):
        recorded([written(tmp_path / "empty", [])], "", Wanted())
    with pytest.raises(NotFound, match="for other"):
        recorded([written(tmp_path / "d", records(count=2))], "other", Wanted())
    several = [*records(count=2), replace_record(records(count=1)[0], model="big")]
    with pytest.raises(InvalidRequest, match="big, tiny"):
        recorded([written(tmp_path / "two", several)], "", Wanted())
    with pytest.raises(InvalidRequest, match=r"only routing"):
        _changed(("queue.limit=3",))


def test_a_mooncake_trace_replays_as_the_bench_does(tmp_path: Path) -> None:
    rng = Random(3)
    rows = [
        {
            "timestamp": 300 * n,
            "hash_ids": [n % 9, 100 + n % 9, *rng.sample(range(10**6), 3)],
            "input_length": 2_400,
            "output_length": 1,
        }
        for n in range(200)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = mooncake([path], Wanted(replicas=3, kv_blocks=64))
    found = Replays(recording, seed=1).run("stoker", recording.config)
    direct = replay_jobs(
        mooncake_prompts(path), replicas=3, hardware=Hardware(kv_blocks=64), config=RoutingConfig(kv_weight=0.0)
    )
    assert (found.hit_rate, found.requests) == (round(direct.hit_rate, 4), 200)
    assert found.moved is None, "the trace says of nobody where he went"
