"""How models are cut over GPUs, and what each then holds."""

from __future__ import annotations

import pytest

from stoker.planner.core.sizing.layout import Layout, kv_bytes, refusal, stages, weights
from stoker.planner.core.sizing.memory import Engine, memory, sequence_bytes
from stoker.planner.core.sizing.search import Limits, layouts, smallest_fitting
from tests.support.sizing_cases import machine, model


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("llama-3.1-8b", Layout(3), "32 heads do not divide by TP 3"),
        ("llama-3.1-8b", Layout(1, 64), "64 stages for 32 layers"),
        ("llama-3.1-8b", Layout(1, 1, 2), "replicas of their own"),
        ("gpt-oss-120b", Layout(1, 1, 3, True), "128 experts do not divide by 3"),
        ("gpt-oss-120b", Layout(1, 1, 1, True), "128 experts do not divide by 1"),
        # Each rank would have 192 columns, and 128 of them share a scale: vLLM refuses this, too.
        ("qwen3-235b-a22b-fp8", Layout(8), "no multiple of the 128"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(name: str, layout: Layout, said: str) -> None:
    assert said in (refusal(model(name), layout) or "")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", Layout(8)),
        ("llama-3.1-70b", Layout(16)),  # two ranks share each KV head
        ("deepseek-v3", Layout(1, 1, 16, True)),
        ("qwen3-235b-a22b-fp8", Layout(8, expert_parallel=True)),
        ("gpt-oss-120b", Layout(2, 2)),
    ],
)
def test_what_vllm_runs_is_allowed(name: str, layout: Layout) -> None:
    assert refusal(model(name), layout) is None


def test_kv_heads_are_copied_where_there_are_more_ranks() -> None:
    (run,) = model("llama-3.1-70b").layers
    eight, sixteen = (
        kv_bytes(model("llama-3.1-70b"), run, Layout(8)),
        kv_bytes(model("llama-3.1-70b"), run, Layout(16)),
    )
    assert eight == sixteen == 2 * 128 * 2


def test_a_latent_cache_is_on_every_rank_and_data_parallel_ranks_share_it_out() -> None:
    deepseek, gpu = model("deepseek-v3"), machine("h200-sxm").gpu
    (tp,) = {kv_bytes(deepseek, run, Layout(8)) for run in deepseek.layers}
    assert tp == 576 * 2
    by_tp = memory(deepseek, Layout(8), gpu, Engine())
    by_dp = memory(deepseek, Layout(1, 1, 8, True), gpu, Engine())
    assert by_dp.tokens > 5 * by_tp.tokens


def test_what_does_not_divide_goes_to_the_stages_before_the_last() -> None:
    counts = [sum(run.count for run in stage) for stage in stages(model("deepseek-v3"), Layout(1, 4))]
    assert counts == [15, 15, 16, 15]
    assert sum(counts) == 61


def test_ends_of_a_pipeline_hold_the_embeddings() -> None:
    first, middle, _, last = weights(model("llama-3.1-70b"), Layout(1, 4))
    assert first.embeddings == pytest.approx(128_256 * 8_192 * 2)
    assert middle.embeddings == 0.0
    assert last.embeddings == pytest.approx(first.embeddings, rel=1e-3)


def test_experts_are_whole_or_cut_but_as_many_bytes() -> None:
    mixtral = model("mixtral-8x7b")
    (cut,), (whole,) = weights(mixtral, Layout(4)), weights(mixtral, Layout(4, expert_parallel=True))
    assert cut.experts == pytest.approx(whole.experts)
    assert 4 * cut.experts == pytest.approx(32 * 8 * 3 * 4_096 * 14_336 * 2)


def test_without_the_hybrid_manager_windows_save_nothing() -> None:
    gemma, layout = model("gemma-3-27b"), Layout(1)
    (runs,) = stages(gemma, layout)
    for tokens, least, most in ((1_000, 0.85, 1.0), (4_000, 2.0, 2.6), (32_000, 4.5, 5.5), (128_000, 5.5, 6.2)):
        hybrid = sequence_bytes(gemma, layout, Engine(), tokens, runs)
        plain = sequence_bytes(gemma, layout, Engine(hybrid=False), tokens, runs)
        assert least <= plain / hybrid <= most, tokens
        assert plain == pytest.approx(gemma.kv_bytes_per_token * tokens, rel=0.02)


def test_a_window_in_every_layer_bounds_the_cache_whatever_the_manager() -> None:
    mistral, layout = model("mistral-7b-v0.1"), Layout(1)
    (runs,) = stages(mistral, layout)
    held = sequence_bytes(mistral, layout, Engine(hybrid=False), 32_000, runs)
    assert held == pytest.approx(131_072 * (4_096 + 16))


def test_utilization_is_vllms_default_and_what_is_left_is_left() -> None:
    held = memory(model("llama-3.1-8b"), Layout(1), machine("h100-sxm").gpu, Engine.on(machine("h100-sxm").gpu))
    assert held.unused == pytest.approx(0.1 * held.total)
    assert held.blocks == held.tokens / 16


def test_one_h100_is_too_small_for_gpt_oss_120b_at_vllms_defaults() -> None:
    gpu = machine("h100-sxm").gpu
    held = memory(model("gpt-oss-120b"), Layout(1), gpu, Engine.on(gpu))
    assert not held.fits
    assert 0.0 < held.missing < 3e9
    fewer = memory(model("gpt-oss-120b"), Layout(1), gpu, Engine(max_seqs=128))
    assert fewer.fits


def test_tp_stays_inside_an_nvlink_domain_and_replicas_fill_hosts() -> None:
    found = set(layouts(model("llama-3.1-70b"), machine("h100-sxm"), Limits(32)))
    assert max(layout.tp for layout in found) == 8
    assert Layout(8, 4) in found
    spine = set(layouts(model("llama-3.1-70b"), machine("gb200"), Limits(32)))
    assert max(layout.tp for layout in spine) == 32


def test_the_smallest_layout_that_fits() -> None:
    engine = Engine()
    assert smallest_fitting(model("llama-3.1-8b"), machine("h100-sxm"), engine) == Layout(1)
    found = smallest_fitting(model("llama-3.1-405b"), machine("h100-sxm"), engine)
    assert found is not None
    assert found.gpus == 16
    assert not memory(model("llama-3.1-405b"), Layout(8), machine("h100-sxm").gpu, engine).fits


def test_links_by_distance() -> None:
    h100, l40s = machine("h100-sxm"), machine("l40s")
    links = [h100.link(2), h100.link(8), h100.link(16), l40s.link(2), l40s.link(16)]
    assert [link and link.name for link in links] == ["NVLink", "NVLink", "fabric", "PCIe", "fabric"]
