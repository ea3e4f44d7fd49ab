"""Replicas for an SLO, the best layout, what follows for placement, and what a simulation says of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stoker.common.errors import InvalidRequest
from stoker.planner import facility_file
from stoker.planner.checking import check, replay
from stoker.planner.core.placement.placing import greedy
from stoker.planner.core.placement.values import PlacementProblem
from stoker.planner.core.sizing import demand
from stoker.planner.core.sizing.layout import Layout
from stoker.planner.core.sizing.measured import Measured, correction
from stoker.planner.core.sizing.rates import Rates
from stoker.planner.core.sizing.search import Answer, Limits, Objective, Plan, Pool, Sizing
from stoker.planner.core.sizing.workload import Role, Slo, Workload
from tests.support.sizing_cases import machine, model


def answered(
    name: str, gpu: str, load: Workload, slo: Slo, limits: Limits, objective: Objective = Objective.GPUS
) -> Answer:
    return Sizing(model(name), (machine(gpu),), load, slo, limits, objective).answer()


def best(answer: Answer) -> Plan:
    assert answer.best is not None
    return answer.best


LOAD, SLO = Workload(20.0, 4_000.0, 500.0), Slo(0.5, 0.04)


def test_the_best_is_on_the_frontier_and_none_there_beats_another() -> None:
    answer = answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(8))
    assert best(answer).gpus == min(plan.gpus for plan in answer.frontier)
    for one in answer.frontier:
        assert not any(
            other.gpus < one.gpus
            and other.ttft_s < one.ttft_s
            and other.itl_s < one.itl_s
            and other.tokens_per_joule > one.tokens_per_joule
            for other in answer.frontier
        )


def test_each_objective_is_least_by_its_own_measure() -> None:
    plans = {
        objective: best(answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(8), objective))
        for objective in (Objective.GPUS, Objective.ENERGY)
    }
    assert plans[Objective.ENERGY].watts <= plans[Objective.GPUS].watts
    assert plans[Objective.GPUS].gpus <= plans[Objective.ENERGY].gpus


def test_one_replica_fewer_breaks_what_is_said_to_bind() -> None:
    answer = answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(8))
    pools = [each.pool for each in answer.candidates if each.pool and each.pool.replicas > 1]
    assert pools
    for pool in pools:
        assert pool.serving.enough(pool.replicas)
        assert not pool.serving.enough(pool.replicas - 1)
        assert pool.binding != "one_replica"


def test_error_bars_enclose_the_answer() -> None:
    for pool in best(answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(8, disaggregated=False))).pools:
        assert pool.fewest is not None
        assert pool.most is not None
        assert pool.fewest <= pool.replicas <= pool.most
        assert pool.fewest < pool.most


def test_a_prefix_cache_saves_prefill() -> None:
    cold = best(answered("llama-3.1-70b", "h100-sxm", LOAD, Slo(1.0, 0.05), Limits(8)))
    warm_load = Workload(20.0, 4_000.0, 500.0, hit_rate=0.7)
    warm = best(answered("llama-3.1-70b", "h100-sxm", warm_load, Slo(1.0, 0.05), Limits(8)))
    assert warm.gpus < cold.gpus


def test_what_no_replica_can_do_is_refused_with_its_time() -> None:
    answer = answered("llama-3.1-70b", "h100-sxm", LOAD, Slo(0.1, 0.01), Limits(8))
    assert answer.best is None
    reasons = {each.refused for each in answer.candidates}
    assert any("prefill alone takes" in reason for reason in reasons)
    assert any("does not fit: " in reason and "GB too much" in reason for reason in reasons)


def test_measurements_correct_the_rates_and_narrow_the_errors() -> None:
    llama, host = model("llama-3.1-8b"), machine("h100-sxm")
    rates = Rates(llama, Layout(2), host)
    slow = [
        Measured(
            "h100-sxm", Layout(2), factor * rates.step_s(n, 2_000.0), sequences=n, context=2_000.0, source="mine"
        )
        for n, factor in ((1.0, 1.45), (16.0, 1.5), (64.0, 1.55))
    ]
    other = Measured("h200-sxm", Layout(2), 1.0, sequences=1.0, context=10.0)
    odd = Measured("h100-sxm", Layout(2), 1e3, sequences=1.0, context=10.0)
    used = correction([*slow, other, odd], llama, host, 8_192)
    assert used.taken == 3
    assert used.why == {"another GPU type": 1, "off by more than ten times": 1}
    assert used.correction.decode == pytest.approx(1.5, rel=0.01)
    assert used.correction.decode_error < 0.1
    assert used.correction.prefill == 1.0
    corrected = Sizing(llama, (host,), LOAD, SLO, Limits(1, False), corrections={"h100-sxm": used.correction})
    plain = Sizing(llama, (host,), LOAD, SLO, Limits(1, False))
    assert best(corrected.answer()).gpus > best(plain.answer()).gpus


def test_placement_gets_groups_nodes_watts_and_traffic() -> None:
    load = Workload(10.0, 3_000.0, 800.0)
    question = Sizing(
        model("deepseek-v3"), (machine("h100-sxm"),), load, Slo(2.0, 0.06), Limits(16, disaggregated=False)
    )
    plan = best(question.answer())
    (pool,) = plan.pools
    (need,) = demand.needs(plan, "chat")
    assert (need.deployment, need.replicas) == ("chat", pool.replicas)
    assert need.gpus * need.members == pool.layout.gpus == 16
    assert (need.gpus, need.members) == (8, 2)
    assert need.gpu_types == frozenset({"h100-sxm"})
    assert need.peer_rate > 1e8
    assert need.busy_power is None  # as the node type says


def test_prefill_and_decode_are_deployments_that_know_each_other() -> None:
    plan = best(answered("llama-3.1-70b", "h100-sxm", LOAD, Slo(1.0, 0.04), Limits(8)))
    assert plan.disaggregated
    prefill, decode = demand.needs(plan, "chat")
    assert (prefill.deployment, decode.deployment) == ("chat-prefill", "chat-decode")
    assert prefill.pair is not None
    assert prefill.pair.deployment == "chat-decode"
    # 20 prompts a second of 4,000 tokens of 327,680 bytes.
    assert prefill.pair.rate == pytest.approx(20 * 4_000 * 327_680, rel=0.01)
    assert decode.pair is None


@pytest.mark.parametrize(("name", "disaggregated"), [("llama-3.1-70b", True), ("deepseek-v3", False)])
def test_what_is_sized_can_be_placed(name: str, disaggregated: bool) -> None:
    hall = facility_file.read(Path(__file__).resolve().parents[2] / "examples" / "facilities" / "two-rows.yaml")
    load, slo = Workload(5.0, 4_000.0, 500.0), Slo(1.5, 0.06)
    plan = best(answered(name, "h100-sxm", load, slo, Limits(16, disaggregated)))
    placed = greedy(PlacementProblem(hall, demand.needs(plan, "chat")))
    assert placed.feasible, placed.unplaced
    assert len(placed.placed) == sum(pool.replicas for pool in plan.pools)


def test_a_simulation_keeps_the_slo_with_the_answer_and_not_with_clearly_fewer() -> None:
    plan = best(answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(1, disaggregated=False)))
    (pool,) = plan.pools
    assert 6 <= pool.replicas <= 8
    held = replay(pool, pool.replicas, seed=1, requests=2_000)
    assert held.holds, held
    fewer = replay(pool, pool.replicas - 1, seed=1, requests=2_000)
    assert not fewer.holds, fewer
    assert fewer.attainment < 0.8


def test_the_simulation_agrees_with_the_formula_on_times() -> None:
    (pool,) = best(answered("llama-3.1-8b", "h100-sxm", LOAD, SLO, Limits(1, disaggregated=False))).pools
    _agree(pool, 8)


def test_a_load_that_cannot_be_simulated_is_refused() -> None:
    plan = best(answered("llama-3.1-8b", "h100-sxm", Workload(5_000.0, 100.0, 10.0), SLO, Limits(1, False)))
    with pytest.raises(InvalidRequest, match="check a part of the load"):
        check(plan)


def _agree(pool: Pool, replicas: int) -> None:
    state = pool.serving.state(replicas)
    seen = replay(pool, replicas, seed=2, requests=2_000)
    assert seen.itl_ms is not None
    assert seen.ttft_ms is not None
    assert seen.itl_ms == pytest.approx(1e3 * state.itl_s, rel=0.1)
    assert seen.ttft_ms == pytest.approx(1e3 * state.ttft_s, rel=0.15)


def test_a_state_without_end_is_infinite() -> None:
    serving = Sizing(model("llama-3.1-8b"), (machine("h100-sxm"),), LOAD, SLO).serving(
        machine("h100-sxm"), Layout(1), Role.BOTH, Sizing(model("llama-3.1-8b"), (), LOAD, SLO).corrected("h100-sxm")
    )
    assert math.isinf(serving.state(1).itl_s)
    assert serving.state(1).late == 1.0
