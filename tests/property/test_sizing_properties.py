"""What must hold for every model, layout and load."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planner.core.sizing.architecture import layer_tensors
from stoker.planner.core.sizing.layout import Layout, refusal, stages, weights
from stoker.planner.core.sizing.memory import Engine, memory, sequence_bytes
from stoker.planner.core.sizing.rates import Correction, Rates
from stoker.planner.core.sizing.search import Limits, Sizing
from stoker.planner.core.sizing.workload import Role, Slo, Workload
from stoker.planner.model_config import BadModelConfig, parse
from tests.support.sizing_cases import MODELS as MODEL_FILES
from tests.support.sizing_cases import machine, model

MODELS = st.sampled_from(
    ["llama-3.1-8b", "llama-3.1-70b", "gpt-oss-120b", "deepseek-v3", "gemma-3-27b", "qwen3-30b-a3b", "mixtral-8x7b"]
)
GPUS = st.sampled_from(["h100-sxm", "h200-sxm", "b200-sxm", "mi300x"])
POWERS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, POWERS, st.sampled_from([1, 2, 4]), POWERS, st.booleans())
WORKLOADS = st.builds(
    Workload,
    st.floats(0.1, 50.0),
    st.floats(50.0, 8_000.0),
    st.floats(1.0, 1_000.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.5, 3.0),
    st.floats(0.0, 0.9),
)
SLOS = st.builds(Slo, st.floats(0.2, 5.0), st.floats(0.02, 0.2), st.floats(0.8, 0.99))


@given(MODELS, GPUS, LAYOUTS, st.floats(0.5, 0.95))
@settings(max_examples=60, deadline=None)
def test_the_terms_sum_to_the_gpus_memory(name: str, gpu: str, layout: Layout, utilization: float) -> None:
    if refusal(model(name), layout):
        return
    held = memory(model(name), layout, machine(gpu).gpu, Engine(utilization))
    assert math.fsum(held.terms.values()) == pytest.approx(float(machine(gpu).gpu.memory), rel=1e-9)
    assert all(value >= 0.0 for term, value in held.terms.items() if term != "kv_cache")


@given(MODELS, POWERS, st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_ranks_hold_every_parameter_once_and_copies_only_of_what_cannot_be_cut(name: str, tp: int, pp: int) -> None:
    what, layout = model(name), Layout(tp, pp)
    if refusal(what, layout) or what.layers[0].feed_forward.format.name == "mxfp4":
        return
    all_ranks = sum(tp * stage.total for stage in weights(what, layout))
    copies = 0.0
    for run in what.layers:
        for kind, tensors in enumerate(layer_tensors(run, what.width)):
            copies += (tp - 1) * run.count * tensors.whole * tensors.format.bytes
            if kind == 1:  # keys and values
                heads = run.attention.kv_heads
                copies += run.count * tensors.divided * tensors.format.bytes * (max(tp, heads) / heads - 1.0)
    copies += (tp - 1) * (what.beside.bytes + what.head.whole * what.head.format.bytes)
    if what.tied and pp > 1:  # the last stage has the table as well as the first
        copies += what.embedding.bytes
    assert all_ranks == pytest.approx(what.weight_bytes + copies, rel=1e-4)


@given(MODELS, GPUS, POWERS, st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_more_gpus_never_hold_fewer_kv_tokens(name: str, gpu: str, tp: int, pp: int) -> None:
    what = model(name)
    for more in (Layout(2 * tp, pp), Layout(tp, 2 * pp)):
        if refusal(what, Layout(tp, pp)) or refusal(what, more):
            continue
        fewer_tokens = memory(what, Layout(tp, pp), machine(gpu).gpu, Engine()).tokens
        assert memory(what, more, machine(gpu).gpu, Engine()).tokens >= fewer_tokens


@given(MODELS, POWERS, st.integers(1, 200_000), st.integers(0, 5_000))
@settings(max_examples=60, deadline=None)
def test_a_longer_sequence_never_needs_less_and_the_hybrid_manager_never_more(
    name: str, tp: int, tokens: int, longer: int
) -> None:
    what, layout = model(name), Layout(tp)
    if refusal(what, layout):
        return
    (runs,) = stages(what, layout)
    needed = sequence_bytes(what, layout, Engine(), tokens, runs)
    assert sequence_bytes(what, layout, Engine(), tokens + longer, runs) >= needed
    if tokens > 2_048:  # below its window a layer's group may lack some members
        assert needed <= sequence_bytes(what, layout, Engine(hybrid=False), tokens, runs) * (1 + 1e-9)


@given(MODELS, GPUS, POWERS, WORKLOADS, SLOS, st.sampled_from(list(Role)), st.floats(1.0, 4.0))
@settings(max_examples=60, deadline=None)
def test_more_requests_or_a_tighter_slo_never_take_fewer_replicas(
    name: str, gpu: str, tp: int, load: Workload, slo: Slo, role: Role, factor: float
) -> None:
    what, host, layout = model(name), machine(gpu), Layout(tp)
    if refusal(what, layout):
        return

    def replicas(load: Workload, slo: Slo) -> float:
        serving = Sizing(what, (host,), load, slo).serving(host, layout, role, Correction())
        if not serving.memory.fits or serving.refusal():
            return math.inf
        state = serving.least()
        return state.replicas if state else math.inf

    least = replicas(load, slo)
    more = Workload(
        factor * load.requests_per_s,
        load.prompt_tokens,
        load.output_tokens,
        load.prompt_scv,
        load.output_scv,
        load.arrival_scv,
        load.hit_rate,
    )
    assert replicas(more, slo) >= least
    assert slo.itl_s is not None
    assert replicas(load, Slo(slo.ttft_s / factor, slo.itl_s, slo.attainment)) >= least
    assert replicas(load, Slo(slo.ttft_s, slo.itl_s / factor, slo.attainment)) >= least
    assert replicas(load, Slo(slo.ttft_s, slo.itl_s, 1.0 - (1.0 - slo.attainment) / factor)) >= least


@given(MODELS, GPUS, LAYOUTS, st.floats(1.0, 500.0), st.floats(1.0, 30_000.0))
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_time(
    name: str, gpu: str, layout: Layout, sequences: float, context: float
) -> None:
    if refusal(model(name), layout):
        return
    rates = Rates(model(name), layout, machine(gpu))
    if rates.refusal():
        return
    step_s = rates.step_s(sequences, context)
    assert 0.0 < step_s <= rates.step_s(2.0 * sequences, context) * (1 + 1e-9)
    assert step_s <= rates.step_s(sequences, 2.0 * context) * (1 + 1e-9)
    assert rates.prefill_s(context, 0.0, 8_192) <= rates.prefill_s(1.5 * context, 0.0, 8_192) * (1 + 1e-9)


def test_the_same_question_has_the_same_answer() -> None:
    load, slo = Workload(20.0, 2_000.0, 300.0), Slo()
    questions = [
        Sizing(model("gpt-oss-120b"), (machine("h100-sxm"), machine("b200-sxm")), load, slo, Limits(8)) for _ in "ab"
    ]
    first, second = (question.answer() for question in questions)
    assert first == second
    assert first.best is not None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "bfloat16", "fp8", "full_attention", "sliding_attention", "x" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
EXAMPLES = [json.loads(path.read_text()) for path in sorted(MODEL_FILES.glob("*.json"))]


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=100, deadline=None)
def test_a_hostile_config_is_read_or_refused_and_never_breaks_a_sizing(
    config: dict[str, Any], data: st.DataObject
) -> None:
    config = copy.deepcopy(config)
    inside = [value for value in config.values() if isinstance(value, dict)]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([config, *inside]))
        key = data.draw(st.sampled_from([*sorted(where), "num_experts", "sliding_window", "quantization_config"]))
        where[key] = data.draw(JSON)
    try:
        what = parse(config, name="x", source="config.json")
    except BadModelConfig:
        return
    question = Sizing(what, (machine("h100-sxm"),), Workload(1.0, 500.0, 50.0), Slo(), Limits(1, False))
    answer = question.answer()
    assert answer.best is not None or all(each.refused for each in answer.candidates)
