"""The benches of cost: the drawing, the timing model, and the published setting in small."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.published_prefix import HARDWARE, SCENARIOS, arrivals, compared, overhead
from bench.svg import drawn
from stoker.bench.replay import Hardware, Job, replay

SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_has_every_line_and_keeps_labels_apart() -> None:
    lines = {"one": [(1.0, 5.0), (10.0, 50.0)], "two <&>": [(1.0, 6.0), (10.0, 51.0)]}
    root = ElementTree.fromstring(drawn("title", "x", "y", lines, {"limit": 100.0}))  # noqa: S314 - our own
    assert len(root.findall(f"{SVG}polyline")) == 2
    labels = {text.text: float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.text in lines}
    assert labels.keys() == lines.keys()
    one, two = labels.values()
    assert abs(one - two) >= 12


def test_prefill_slows_with_what_it_attends_to_and_decoding_with_what_it_reads() -> None:
    hardware = Hardware(
        block_size=10,
        kv_blocks=100,
        prefill_rate=100.0,
        request_s=0.5,
        attended_s=0.001,
        decode_s=1.0,
        sequence_s=0.1,
        context_s=0.01,
        batching=True,
        chunk_tokens=60,
    )
    outcome = replay([Job(0.0, tuple(range(10)), 100, 3)], replicas=1, hardware=hardware, policy="round_robin")
    prefill = 100 / 100.0 + 0.001 * 100 * 100 / 2 + 0.5
    assert outcome.ttft(0.5) == pytest.approx(prefill)
    decode = 2 * (1.0 + 0.1) + 0.01 * (101 + 102)
    assert outcome.makespan == pytest.approx(prefill + decode)


def test_the_model_of_the_published_fleet_is_of_its_size() -> None:
    assert 1.1e6 < HARDWARE.kv_blocks * HARDWARE.block_size < 1.4e6
    tokens = 64_000
    prefill_s = tokens / HARDWARE.prefill_rate + tokens * tokens / 2 * HARDWARE.attended_s
    assert 2.0 < prefill_s < 6.0
    assert HARDWARE.request_s > 0


def test_stoker_keeps_documents_where_they_are() -> None:
    scenario = replace(SCENARIOS[1], documents=20, seconds=10.0)
    baseline, ours = compared(scenario, 10.0, seeds=[1])
    assert isinstance(ours["hit_rate"], float)
    assert isinstance(baseline["hit_rate"], float)
    assert ours["hit_rate"] > baseline["hit_rate"] + 0.2
    assert isinstance(ours["ttft_p50_%"], float)
    assert ours["ttft_p50_%"] < 0
    assert [job.at for job in arrivals(scenario, 10.0, 1)] == [job.at for job in arrivals(scenario, 10.0, 1)]


def test_the_overhead_is_measured_in_milliseconds() -> None:
    figures = overhead(replace(SCENARIOS[1], context=1_024, question=64), 16, rounds=40)
    both = figures["both_ms"]
    assert isinstance(both, float)
    assert 0.0 < both < 100.0
