"""Measurements from files and from agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import registry_pb2
from stoker.cli.plan.measuring import layout_of
from stoker.planner.core.sizing.layout import Layout
from stoker.planner.profiles import BadProfile, of_agents, read

OURS = """gpu,kind,seconds,model,tp,tokens,cached,sequences,context
h100-sxm,prefill,0.4,llama-3.1-70b,4,4000,0,,
h100-sxm,decode,0.03,,4,,,32,2000
"""
AICONFIGURATOR = """model,isl,osl,bs,ttft,tpot,seq/s,tp,pp,dp,moe_tp,moe_ep,backend,system
QWEN3_32B,4000,500,16,210.5,18.2,1.7,2,1,1,1,1,vllm,h100_sxm
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "profile.csv"
    path.write_text(text)
    return path


def test_our_columns(tmp_path: Path) -> None:
    prefill, decode = read(written(tmp_path, OURS))
    assert (prefill.gpu, prefill.model, prefill.layout, prefill.seconds) == (
        "h100-sxm", "llama-3.1-70b", Layout(4), 0.4
    )  # fmt: skip
    assert (prefill.tokens, prefill.sequences) == (4_000, 0)
    assert (decode.sequences, decode.context, decode.model) == (32, 2_000, "")


def test_aiconfigurators_columns(tmp_path: Path) -> None:
    (decode,) = read(written(tmp_path, AICONFIGURATOR))
    assert (decode.gpu, decode.layout) == ("h100-sxm", Layout(2))
    assert decode.seconds == pytest.approx(0.0182)
    assert (decode.sequences, decode.context) == (16, 4_250)
    assert (decode.prefills_per_s, decode.tokens) == (1.7, 4_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "profile.csv:1: no column gpu, kind, seconds; columns are gpu"),
        ("gpu,kind,seconds\nh100-sxm,both,1\n", "profile.csv:2: kind: 'both' is neither"),
        ("gpu,kind,seconds,tokens\nh100-sxm,prefill,fast,1\n", "seconds: 'fast' is no number"),
        ("gpu,kind,seconds,tokens\nh100-sxm,prefill,-1,1\n", "seconds: '-1' is no number above 0"),
        ("gpu,kind,seconds,tokens\nh100-sxm,prefill,nan,1\n", "seconds: 'nan'"),
        ("gpu,kind,seconds,tokens,tp\nh100-sxm,prefill,1,1,many\n", "tp: 'many' is no whole number"),
        ("gpu,kind,seconds\n,prefill,1\n", "gpu: missing"),
        ("gpu,kind,seconds,sequences\nh100-sxm,decode,1,4\n", "context: '' is no number"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadProfile) as caught:
        read(written(tmp_path, text))
    assert said in caught.value.message


def test_all_mistakes_are_told_at_once_but_not_endlessly(tmp_path: Path) -> None:
    with pytest.raises(BadProfile) as caught:
        read(written(tmp_path, "gpu,kind,seconds\n" + "x,y,z\n" * 100))
    lines = caught.value.message.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 80 more"


def load(**values: float) -> registry_pb2.ReplicaLoad:
    return registry_pb2.ReplicaLoad(replica_id="chat-0", epoch=1, **values)  # type: ignore[arg-type]


def test_agents_measure_prefill_rates_and_steps() -> None:
    before = {"chat-0": load(running=10, active_tokens=20_000, itl_sum_s=100.0, itl_count=5_000, prefill_sum_s=3.0)}
    after = {
        "chat-0": load(
            running=14, active_tokens=28_000, itl_sum_s=160.0, itl_count=8_000, prefill_sum_s=5.0,
            prefill_tokens_per_s=20_480.0,
        )
    }  # fmt: skip
    prefill, decode = of_agents(before, after, 10.0, "h100-sxm", Layout(2))
    assert prefill.tokens == 2_048
    assert prefill.seconds == pytest.approx(0.1)
    # 60 s for 3,000 tokens, of which a fifth went to prefill.
    assert decode.seconds == pytest.approx(0.02 * 0.8)
    assert (decode.sequences, decode.context) == (12, 2_000)


@pytest.mark.parametrize(
    "after",
    [
        load(running=10, itl_sum_s=160.0, itl_count=8_000),  # nobody said how much context
        load(running=0, active_tokens=0, itl_sum_s=160.0, itl_count=8_000),
        load(running=10, active_tokens=1_000, itl_sum_s=100.0, itl_count=5_000),  # nothing was generated
        load(running=10, active_tokens=1_000, itl_sum_s=160.0, itl_count=8_000, prefill_sum_s=9.0),  # all prefill
    ],
)
def test_what_says_nothing_is_left_out(after: registry_pb2.ReplicaLoad) -> None:
    before = {"chat-0": load(running=0, active_tokens=0, itl_sum_s=100.0, itl_count=5_000)}
    assert of_agents(before, {"chat-0": after}, 10.0, "h100-sxm", Layout(1)) == []


def test_an_engine_that_restarted_says_nothing_of_its_steps() -> None:
    before = {"chat-0": load(running=9, active_tokens=900, itl_sum_s=1.0, itl_count=50)}
    after = registry_pb2.ReplicaLoad(epoch=2, running=9, active_tokens=900, itl_sum_s=3.0, itl_count=150)
    assert of_agents(before, {"chat-0": after}, 10.0, "h100-sxm", Layout(1)) == []


def test_a_layout_is_read_from_the_engines_arguments() -> None:
    spec = common_pb2.DeploymentSpec(
        engine_args=["--tensor-parallel-size", "4", "--pipeline-parallel-size=2", "--enable-expert-parallel"]
    )
    assert layout_of(spec) == Layout(4, 2, 1, True)
    assert layout_of(common_pb2.DeploymentSpec()) == Layout()


def test_a_size_that_is_none_is_left_out() -> None:
    for size in ("²", "9" * 5_000, "0", "-2"):
        assert layout_of(common_pb2.DeploymentSpec(engine_args=["-tp", size])) == Layout()


def test_lines_at_fault_count_as_rows(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="more than 100,000 rows"):
        read(written(tmp_path, "gpu,kind,seconds\n" + ",,\n" * 100_001))


def test_a_device_is_read_no_further_than_a_file_may_be_long() -> None:
    with pytest.raises(BadProfile, match="/dev/zero has more than"):
        read(Path("/dev/zero"))
