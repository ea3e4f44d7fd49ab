"""Predictions against what was published: the errors are those that docs/sizing.md and the error bars state."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.measured import predicted_s
from stoker.planner.core.sizing.memory import Engine, memory
from stoker.planner.core.sizing.published import MEMORY, RATES, Logged, Published
from stoker.planner.core.sizing.rates import Rates
from stoker.planner.core.units import Bytes
from tests.support.sizing_cases import MODELS, machine, model

GIB = 2**30


def error(each: Published) -> float:
    """Logarithm of measured over predicted."""
    measured = each.measured
    rates = Rates(model(measured.model), measured.layout, machine(measured.gpu))
    return math.log(measured.seconds / predicted_s(measured, rates, 8_192))


def rms(errors: list[float]) -> float:
    return math.sqrt(fmean(each * each for each in errors))


def test_the_error_bars_are_the_errors_of_the_published_measurements() -> None:
    prefill = [error(each) for each in RATES if not each.measured.sequences]
    decode = [error(each) for each in RATES if each.measured.sequences]
    assert len(prefill) >= 10
    assert len(decode) >= 30
    # Neither smaller than what was found nor so large that they say nothing.
    assert 0.9 * factors.PREFILL_ERROR <= rms(prefill) <= factors.PREFILL_ERROR
    assert 0.9 * factors.DECODE_ERROR <= rms(decode) <= factors.DECODE_ERROR
    assert abs(fmean(prefill)) < 0.1
    assert abs(fmean(decode)) < 0.1


def test_vllms_own_measurements_are_met() -> None:
    errors = [error(each) for each in RATES if each.source.startswith("buildkite.com/vllm")]
    assert max(map(abs, errors)) < 0.06


@pytest.mark.parametrize("logged", MEMORY, ids=lambda each: f"{each.model}-{each.date}")
def test_what_is_left_for_kv_is_what_vllm_logged(logged: Logged) -> None:
    gpu = replace(machine(logged.gpu).gpu, memory=Bytes(round(logged.gpu_gib * GIB)))
    engine = Engine(logged.utilization, 16, logged.batched_tokens, logged.max_seqs)
    held = memory(model(logged.model), logged.layout, gpu, engine)
    assert held.kv / GIB == pytest.approx(logged.kv_gib, abs=1.2)
    if logged.weights_gib:
        assert held.weights.total / GIB == pytest.approx(logged.weights_gib, rel=0.025)
    if logged.tokens:
        assert held.tokens == pytest.approx(logged.tokens, rel=0.1)


def test_every_measurement_has_its_source_and_date() -> None:
    assert all(each.source and each.date for each in RATES)
    assert all(each.source and each.date for each in MEMORY)


def test_the_document_states_these_errors_and_has_every_measurement() -> None:
    text = (MODELS.parents[1] / "docs" / "sizing.md").read_text()
    prefill = rms([error(each) for each in RATES if not each.measured.sequences])
    decode = rms([error(each) for each in RATES if each.measured.sequences])
    assert f"**{prefill:.2f} for prefill, {decode:.2f} for decoding**" in text
    for each in RATES:
        assert f"| {1e3 * each.measured.seconds:.1f} ms |" in text, each
    for logged in MEMORY:
        assert f"| {logged.kv_gib:.2f} GiB |" in text, logged
