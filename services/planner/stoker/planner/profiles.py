"""Measurements that correct a sizing: a CSV of one's own, what aiconfigurator writes, what agents report."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import Code, StokerError
from stoker.planner.core.sizing.layout import Layout
from stoker.planner.core.sizing.measured import Measured, Used, correction
from stoker.planner.core.sizing.search import Sizing

COLUMNS = ("gpu", "kind", "seconds")
OPTIONAL = ("model", "tp", "pp", "dp", "ep", "tokens", "cached", "sequences", "context", "prefills_per_s")
_AICONFIGURATOR = {"isl", "osl", "ttft", "tpot", "tp"}
_SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "gb200": "gb200",
    "gb200_sxm": "gb200",
    "l40s": "l40s",
}
_MAX_BYTES, _MOST_ROWS, _MOST_MISTAKES = 16 << 20, 100_000, 20
_LONGEST_S = 3_600.0
_MOST_BUSY = 0.8
"""With more of a replica's time spent on prefill its steps tell little."""


class BadProfile(StokerError):
    """A file of measurements is wrong; lines are named."""

    code = Code.INVALID_ARGUMENT
    reason = "BAD_PROFILE"


def read(path: Path) -> list[Measured]:
    """Measurements of a CSV, of our columns or aiconfigurator's. Raises BadProfile naming every line at fault."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise BadProfile(f"cannot read {path}: {said}; name a CSV of measurements") from error
    if len(raw) > _MAX_BYTES:
        raise BadProfile(f"{path} has more than {_MAX_BYTES:,} bytes; cut it")
    reader = csv.DictReader(text.splitlines())
    header = set(reader.fieldnames or ())
    ours = set(COLUMNS) <= header
    if not ours and not header >= _AICONFIGURATOR:
        missing = ", ".join(name for name in COLUMNS if name not in header)
        raise BadProfile(f"{path}:1: no column {missing}; columns are {', '.join(COLUMNS + OPTIONAL)}")
    found: list[Measured] = []
    mistakes: list[str] = []
    try:
        for row in reader:
            if len(found) + len(mistakes) >= _MOST_ROWS:
                raise BadProfile(f"{path}: more than {_MOST_ROWS:,} rows; cut it")
            try:
                found += [_ours(row, path.name)] if ours else _aiconfigurator(row, path.name)
            except ValueError as error:
                mistakes.append(f"{path}:{reader.line_num}: {error}")
    except csv.Error as error:
        mistakes.append(f"{path}:{reader.line_num}: it is no CSV ({error}); mend it")
    if mistakes:
        more = f"\nand {len(mistakes) - _MOST_MISTAKES} more" if len(mistakes) > _MOST_MISTAKES else ""
        raise BadProfile("\n".join(mistakes[:_MOST_MISTAKES]) + more)
    return found


def of_agents(
    before: Mapping[str, registry_pb2.ReplicaLoad],
    after: Mapping[str, registry_pb2.ReplicaLoad],
    seconds: float,
    gpu: str,
    layout: Layout,
) -> list[Measured]:
    """What replicas' agents measured between two looks that many seconds apart. Unset is unknown: it says nothing.

    A prefill rate is taken for a prompt of 2,048 tokens, a time between tokens without the share of the time that
    prefill took, for the mean of the sequences that ran at both looks.
    """
    found = []
    for name, now in after.items():
        if now.HasField("prefill_tokens_per_s") and now.prefill_tokens_per_s > 0.0:
            found.append(Measured(gpu, layout, 2_048.0 / now.prefill_tokens_per_s, tokens=2_048.0, source="agents"))
        then = before.get(name)
        if then is not None and then.epoch == now.epoch:
            found += _step(then, now, seconds, gpu, layout)
    return found


def corrected(question: Sizing, measured: Sequence[Measured]) -> tuple[Sizing, dict[str, Used]]:
    """The question with its rates corrected by measurements, and by GPU type what became of these."""
    used = {
        machine.gpu.name: correction(measured, question.model, machine, question.engine_on(machine).batched_tokens)
        for machine in question.machines
    }
    return replace(question, corrections={gpu: each.correction for gpu, each in used.items()}), used


def _step(
    then: registry_pb2.ReplicaLoad, now: registry_pb2.ReplicaLoad, seconds: float, gpu: str, layout: Layout
) -> Iterable[Measured]:
    if not (_knows(then) and _knows(now)):
        return
    tokens, sequences = now.itl_count - then.itl_count, (then.running + now.running) / 2.0
    busy = max(0.0, now.prefill_sum_s - then.prefill_sum_s) / seconds if seconds > 0.0 else 1.0
    if tokens < 10 or sequences < 1.0 or busy > _MOST_BUSY:
        return
    itl_s = (now.itl_sum_s - then.itl_sum_s) / tokens
    context = (then.active_tokens + now.active_tokens) / 2.0 / sequences
    if 0.0 < itl_s < _LONGEST_S:
        step_s = itl_s * (1.0 - busy)
        # Each data-parallel rank and pipeline stage steps for its own part of them.
        each = max(1.0, sequences / layout.queues)
        yield Measured(gpu, layout, step_s, sequences=each, context=context, source="agents")


def _knows(load: registry_pb2.ReplicaLoad) -> bool:
    return (
        load.HasField("running")
        and load.HasField("itl_sum_s")
        and load.HasField("itl_count")
        and load.HasField("active_tokens")
    )


def _ours(row: Mapping[str, str | None], source: str) -> Measured:
    gpu, kind = (row["gpu"] or "").strip(), (row["kind"] or "").strip()
    if not gpu:
        raise ValueError("gpu: missing; name a GPU type of the catalogue")
    if kind not in ("prefill", "decode"):
        raise ValueError(f"kind: {kind[:40]!r} is neither prefill nor decode")
    expert_parallel = (row.get("ep") or "").strip().lower() in ("1", "true", "yes")
    layout = Layout(_whole(row, "tp"), _whole(row, "pp"), _whole(row, "dp"), expert_parallel)
    seconds = _number(row, "seconds", most=_LONGEST_S)
    model = (row.get("model") or "").strip()
    if kind == "prefill":
        tokens, cached = _number(row, "tokens"), _number(row, "cached", default=0.0)
        return Measured(gpu, layout, seconds, tokens=tokens, cached=cached, model=model, source=source)
    per_s = _number(row, "prefills_per_s", default=0.0)
    return Measured(
        gpu,
        layout,
        seconds,
        tokens=_number(row, "tokens") if per_s else 0.0,
        sequences=_number(row, "sequences"),
        context=_number(row, "context"),
        prefills_per_s=per_s,
        model=model,
        source=source,
    )


def _aiconfigurator(row: Mapping[str, str | None], source: str) -> list[Measured]:
    """A row of its `best_config_topn.csv` for aggregated serving: times in ms, of one worker with `bs` requests."""
    system = (row.get("system") or "").strip()
    layout = Layout(_whole(row, "tp"), _whole(row, "pp"), _whole(row, "dp"), _whole(row, "moe_ep") > 1)
    prompt, output = _number(row, "isl"), _number(row, "osl")
    gpu = _SYSTEMS.get(system, system)
    sequences, per_s = _number(row, "bs", default=1.0), _number(row, "seq/s", default=0.0)
    return [
        Measured(
            gpu,
            layout,
            _number(row, "tpot") / 1e3,
            tokens=prompt,
            sequences=max(1.0, sequences),
            context=prompt + output / 2.0,
            prefills_per_s=per_s / layout.queues,
            source=source,
        )
    ]


def _whole(row: Mapping[str, str | None], name: str) -> int:
    text = (row.get(name) or "1").strip()
    try:
        value = int(float(text))
    except (ValueError, OverflowError):
        value = 0
    if not 1 <= value <= 1_024:
        raise ValueError(f"{name}: {text[:40]!r} is no whole number from 1 to 1024")
    return value


def _number(row: Mapping[str, str | None], name: str, default: float | None = None, most: float = 1e9) -> float:
    text = (row.get(name) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0.0 or (value == 0.0 and default == 0.0)) or value > most:
        raise ValueError(f"{name}: {text[:40]!r} is no number above 0, at most {most:g}")
    return value
