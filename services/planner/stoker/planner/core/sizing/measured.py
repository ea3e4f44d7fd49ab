"""What was measured, against what the roofline says: factors that correct it, and what error remains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.architecture import Model
from stoker.planner.core.sizing.layout import Layout, refusal
from stoker.planner.core.sizing.machine import Machine
from stoker.planner.core.sizing.rates import Correction, Rates

_ODD = 10.0
"""A measurement that is off by more than this factor is of something else."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One time: of a prefill of `tokens` behind `cached` (`sequences` 0), or of a decode step of `sequences` with
    `context` tokens each, on one rank. Where prefills of `tokens` come `prefills_per_s` to that rank meanwhile, it is
    the time between tokens that they leave. `model` is empty where it is not known."""

    gpu: str
    layout: Layout
    seconds: float
    tokens: float = 0.0
    cached: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    prefills_per_s: float = 0.0
    model: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """How far measurements reach: `taken` were used; `why` says of each other kind how many were not."""

    correction: Correction
    taken: int
    why: dict[str, int]


def correction(measured: Sequence[Measured], model: Model, machine: Machine, chunk: int) -> Used:
    """What measurements of this model on this GPU type say. Prefill and decode are corrected apart, each by the
    geometric mean of measured over predicted times; the error that remains is the spread of these around it, half of
    the published error where there is one measurement alone."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    why: dict[str, int] = {}
    for each in measured:
        reason, ratio = _ratio(each, model, machine, chunk)
        if ratio is None:
            why[reason] = why.get(reason, 0) + 1
        else:
            ratios[not each.sequences].append(math.log(ratio))
    prefill, prefill_error = _fitted(ratios[True], factors.PREFILL_ERROR)
    decode, decode_error = _fitted(ratios[False], factors.DECODE_ERROR)
    sources = ", ".join(sorted({each.source for each in measured if each.source}))
    taken = len(ratios[True]) + len(ratios[False])
    return Used(Correction(prefill, decode, prefill_error, decode_error, sources if taken else ""), taken, why)


def predicted_s(each: Measured, rates: Rates, chunk: int) -> float:
    """The time that the roofline says for what was measured; infinite where prefills leave nothing."""
    if not each.sequences:
        return rates.prefill_s(each.tokens, each.cached, chunk)
    busy = each.prefills_per_s * rates.prefill_s(each.tokens, each.cached, chunk) if each.prefills_per_s else 0.0
    return rates.step_s(each.sequences, each.context) / (1.0 - busy) if busy < 1.0 else math.inf


def _ratio(each: Measured, model: Model, machine: Machine, chunk: int) -> tuple[str, float | None]:
    """Measured over predicted, or why it says nothing."""
    if each.gpu != machine.gpu.name:
        return "another GPU type", None
    if each.model and each.model != model.name:
        return "another model", None
    rates = Rates(model, each.layout, machine)
    if refusal(model, each.layout) or rates.refusal():
        return "a layout that this model cannot have", None
    ratio = each.seconds / predicted_s(each, rates, chunk)
    return ("", ratio) if 1.0 / _ODD < ratio < _ODD else ("off by more than ten times", None)


def _fitted(logs: Sequence[float], published: float) -> tuple[float, float]:
    if not logs:
        return 1.0, published
    mean = fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), published / 2.0
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / (len(logs) - 1))
    return math.exp(mean), math.hypot(spread, factors.MEASURED_ERROR)
