"""Recorded decisions as a replay: who asked for what and when, on what machines, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median

from stoker.bench.published import mooncake_prompts
from stoker.bench.replay import Hardware, Job, Outcome, pooled_hit_rate, replay
from stoker.common.errors import InvalidRequest, NotFound
from stoker.router.core import Decision, RoutingConfig
from stoker.router.decisions.records import Record, decoded

_MOONCAKE_REPLICAS = 7


@dataclass(frozen=True)
class Figures:
    """What a replay, or the recording itself, shows. None is unknown."""

    policy: str
    settings: str
    requests: int
    hit_rate: float | None
    """Cached tokens over the tokens of all full blocks."""
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    requests_per_s: float
    moved: int | None
    """Requests that went to another replica than the recording says."""
    over_bound: int | None


@dataclass(frozen=True)
class Recording:
    """Jobs in order of arrival, and the replica that each was sent to first; empty where that is not known."""

    jobs: list[Job]
    placed: list[str]
    replicas: tuple[str, ...]
    hardware: Hardware
    config: RoutingConfig
    """What the replay routes by, where nothing else is said."""
    told: Figures | None = None
    """What the recording says of itself; None for a trace of requests alone."""


@dataclass(frozen=True)
class Wanted:
    """What a user said of the machines to simulate; None and 0: as recorded."""

    replicas: int = 0
    kv_blocks: int = 0
    prefill_rate: float | None = None
    speed: float = 1.0
    requests: int = 0


def recorded(files: Sequence[Path], model: str, wanted: Wanted) -> Recording:
    """Read what a router has recorded, rotated files in any order.

    Raises InvalidRequest naming the line that is no record, the option that is missing, or the models to choose
    from, and NotFound where nothing is recorded.
    """
    records = sorted(chain.from_iterable(map(_read, files)), key=lambda record: record.at)
    models = sorted({record.model for record in records})
    if len(models) > 1 and not model:
        raise InvalidRequest.field("--model", f"several models are recorded, name one: {', '.join(models)}")
    first = [record for record in records if record.model == (model or record.model) and record.attempt == 1]
    if not first:
        raise NotFound(f"no decision{f' for {model}' if model else ''} is recorded in {_names(files)}")
    first = first[: wanted.requests] if wanted.requests else first
    size = Counter(record.block_size for record in first).most_common(1)[0][0]
    first = [record for record in first if record.block_size == size]
    hardware = _hardware(first, size, wanted)
    began = first[0].at
    jobs = [
        Job(
            (record.at - began) / wanted.speed,
            record.block_keys(),
            record.prompt_tokens,
            record.output_tokens if record.generated_tokens is None else record.generated_tokens,
            asked_tokens=record.output_tokens,
            tenant=record.tenant,
            priority=record.priority,
            weight=record.weight,
            session=record.session,
        )
        for record in first
    ]
    names = _replicas(first, wanted.replicas)
    return Recording(jobs, [record.replica for record in first], names, hardware, _config(hardware), _told(first))


def mooncake(files: Sequence[Path], wanted: Wanted) -> Recording:
    """Read Mooncake traces. Raises InvalidRequest naming the line that is not a request."""
    jobs = sorted(chain.from_iterable(map(mooncake_prompts, files)), key=lambda job: job.at)
    jobs = [replace(job, at=job.at / wanted.speed) for job in (jobs[: wanted.requests] if wanted.requests else jobs)]
    if not jobs:
        raise NotFound(f"no request is in {_names(files)}")
    hardware = Hardware()
    hardware = replace(
        hardware,
        kv_blocks=wanted.kv_blocks or hardware.kv_blocks,
        prefill_rate=wanted.prefill_rate or hardware.prefill_rate,
    )
    names = tuple(f"replica-{number}" for number in range(wanted.replicas or _MOONCAKE_REPLICAS))
    return Recording(jobs, [], names, hardware, _config(hardware))


class Replays:
    """Replays one recording under several policies and settings."""

    def __init__(self, recording: Recording, seed: int) -> None:
        self._recording = recording
        self._seed = seed

    @property
    def pooled_hit_rate(self) -> float:
        """Of one cache as large as all replicas' together, in order of arrival."""
        recording = self._recording
        return pooled_hit_rate(recording.jobs, len(recording.replicas) * recording.hardware.kv_blocks)

    def run(
        self,
        policy: str,
        config: RoutingConfig,
        settings: str = "",
        *,
        sent: Callable[[int], None] = lambda count: None,
    ) -> Figures:
        """One replay; the same recording, settings and seed give the same figures. `sent` hears how far it is."""
        recording = self._recording
        places = {id(job): place for job, place in zip(recording.jobs, recording.placed, strict=False)}
        known = set(recording.replicas)
        moved = count = 0

        def note(job: Job, decision: Decision) -> None:
            nonlocal moved, count
            count += 1
            place = places.get(id(job))
            moved += place in known and place != decision.replica
            sent(count)

        outcome = replay(
            recording.jobs,
            replicas=recording.replicas,
            hardware=recording.hardware,
            policy=policy,
            config=config,
            seed=self._seed,
            sent=note,
        )
        return _figures(outcome, policy, settings, moved if places else None)


def _figures(outcome: Outcome, policy: str, settings: str, moved: int | None) -> Figures:
    return Figures(
        policy=policy,
        settings=settings,
        requests=len(outcome.waits),
        hit_rate=round(outcome.hit_rate, 4) if outcome.blocks else None,
        ttft_p50_ms=round(1e3 * outcome.ttft(0.5), 1),
        ttft_p99_ms=round(1e3 * outcome.ttft(0.99), 1),
        requests_per_s=round(outcome.requests_per_s, 3),
        moved=moved,
        over_bound=outcome.over_bound,
    )


def _told(records: Sequence[Record]) -> Figures:
    hits = [record for record in records if record.cached_tokens is not None and record.keys]
    blocks = sum(len(record.keys) // 8 * record.block_size for record in hits)
    measured = Outcome(ttfts=[r.ttft_s for r in records if r.ttft_s is not None and r.outcome == "ok"])
    seconds = max(record.at + record.took_s for record in records) - records[0].at
    return Figures(
        policy="recorded",
        settings="",
        requests=len(records),
        hit_rate=round(sum(record.cached_tokens or 0 for record in hits) / blocks, 4) if blocks else None,
        ttft_p50_ms=round(1e3 * measured.ttft(0.5), 1) if measured.ttfts else None,
        ttft_p99_ms=round(1e3 * measured.ttft(0.99), 1) if measured.ttfts else None,
        requests_per_s=round(len(records) / max(1e-9, seconds), 3),
        moved=None,
        over_bound=None,
    )


def _read(file: Path) -> Iterable[Record]:
    try:
        with file.open("rb") as lines:
            yield from decoded(lines)
    except ValueError as error:
        raise InvalidRequest.field("FILE", f"{file}: {error}") from error
    except OSError as error:
        raise InvalidRequest.field("FILE", f"cannot read {file}: {error.strerror}") from error


def _hardware(records: Sequence[Record], block_size: int, wanted: Wanted) -> Hardware:
    blocks = wanted.kv_blocks or _middle([record.kv_blocks for record in records if record.kv_blocks])
    if not blocks:
        raise InvalidRequest.field("--kv-blocks", "how many blocks a replica holds is not recorded; say it")
    rate = wanted.prefill_rate or _middle([record.prefill_rate for record in records if record.prefill_rate])
    if not rate:
        raise InvalidRequest.field(
            "--prefill-rate", "how fast a replica computes prompts is not recorded; say it, in tokens/s"
        )
    steps = [
        (record.took_s - record.ttft_s) / (record.generated_tokens - 1)
        for record in records
        if record.ttft_s is not None and record.generated_tokens is not None and record.generated_tokens > 1
    ]
    return Hardware(
        block_size=block_size,
        kv_blocks=int(blocks),
        prefill_rate=rate,
        request_s=0.005,
        decode_s=_middle(steps) or 0.0,
        batching=True,
    )


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _config(hardware: Hardware) -> RoutingConfig:
    # Where nothing is decoded, only prefill is load.
    return RoutingConfig() if hardware.decode_s else RoutingConfig(kv_weight=0.0)


def _replicas(records: Sequence[Record], wanted: int) -> tuple[str, ...]:
    """As many as most decisions chose from: those that got most of the requests, by their own names."""
    number = wanted or Counter(record.candidates for record in records).most_common(1)[0][0] or 1
    seen = [name for name, _ in Counter(record.replica for record in records).most_common(number)]
    others = (f"unseen-{count}" for count in range(1, number + 1))
    return tuple(sorted((*seen, *islice(others, number - len(seen)))))


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files))
