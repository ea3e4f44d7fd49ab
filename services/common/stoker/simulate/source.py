"""What is replayed, and on what: a file of any format, or a generated load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from operator import attrgetter
from pathlib import Path

from stoker.bench import recordings
from stoker.bench.published import azure, mooncake
from stoker.bench.replicas import Hardware, Job
from stoker.common.errors import InvalidRequest
from stoker.simulate.hardware import DEFAULT
from stoker.simulate.loads import GENERATORS
from stoker.simulate.traffic import Scale, Source, scaled

_READERS = {"azure": azure, "mooncake": mooncake}


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs, the hardware they are served on, and what to call both."""

    name: str
    jobs: Source
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user said; empty and zero: as recorded, or the default hardware's."""

    model: str = ""
    kv_blocks: int = 0
    prefill_rate: float = 0.0


def generated(name: str, wanted: Wanted, scale: Scale, seed: int) -> Trace:
    """A load of known shape."""
    return Trace(name, scaled(partial(GENERATORS[name], seed), scale, seed), _hardware(wanted))


def read(form: str, files: Sequence[Path], wanted: Wanted, scale: Scale, seed: int) -> Trace:
    """A trace from files: of `azure` or `mooncake`, or what a router has recorded (`stoker`).

    Raises InvalidRequest naming the file, the line and what to do; for azure and mooncake when the trace is read.
    """
    name = ", ".join(file.name for file in files)
    if form == "stoker":
        known = recordings.Wanted(kv_blocks=wanted.kv_blocks, prefill_rate=wanted.prefill_rate or None)
        recording = recordings.recorded(files, wanted.model, known)
        jobs = [_whole(job, recording.hardware.block_size) for job in recording.jobs]
        hardware = replace(recording.hardware, max_seqs=DEFAULT.max_seqs)
        return Trace(name, scaled(lambda: iter(jobs), scale, seed), hardware)
    if wanted.model:
        raise InvalidRequest.field("--model", f"a trace of {form} names no models; leave it out")

    def from_files() -> Iterator[Job]:
        return merge(*map(_READERS[form], files), key=attrgetter("at"))

    return Trace(name, scaled(from_files, scale, seed), _hardware(wanted))


def _hardware(wanted: Wanted) -> Hardware:
    return replace(
        DEFAULT,
        kv_blocks=wanted.kv_blocks or DEFAULT.kv_blocks,
        prefill_rate=wanted.prefill_rate or DEFAULT.prefill_rate,
    )


def _whole(job: Job, block_size: int) -> Job:
    """With the blocks that a recording does not name: the last, partly filled one, and those of the answer."""
    blocks = -(-(job.prompt_tokens + job.output_tokens) // block_size)
    return replace(job, own_blocks=max(0, blocks - len(job.keys)))
