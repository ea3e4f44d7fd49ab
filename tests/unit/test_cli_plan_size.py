"""`stoker plan size`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import errors, main

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "models" / "llama-3.1-8b.json")
ISSUED = ["--isl", "4000", "--osl", "500", "--rps", "20", "--slo-ttft-ms", "500", "--slo-itl-ms", "40"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main._run(["plan", "size", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "-o", "json")
    assert status == errors.OK, err
    value: dict[str, Any] = json.loads(out)
    return value


def test_json_has_inputs_memory_by_terms_and_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    value = as_json(capsys, "--model", MODEL, "--gpu", "h100-sxm", *ISSUED)
    assert value["model"]["kv_bytes_per_token"] == 131_072
    assert value["inputs"]["engines"]["h100-sxm"]["utilization"] == 0.9
    assert value["gpus"] == sum(pool["gpus"] for pool in value["best"]["pools"])
    for pool in value["best"]["pools"]:
        memory = pool["memory"]
        terms = [
            "outside_utilization_share", "weights_embeddings", "weights_attention", "weights_feed_forward",
            "weights_experts", "weights_other", "activation_peak", "cuda_graphs", "non_torch", "kv_cache",
        ]  # fmt: skip
        assert sum(memory[f"{term}_bytes"] for term in terms) == pytest.approx(memory["total_bytes"], abs=10)
        assert pool["binding"]
        assert pool["replicas_fewest"] <= pool["replicas"] <= pool["replicas_most"]
    assert value["simulated"] is None
    assert len(value["considered"]) > 30


def test_each_gpu_type_has_vllms_defaults_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    value = as_json(capsys, "--model", MODEL, "--gpu", "h100-sxm", "--gpu", "l40s", *ISSUED, "--max-num-seqs", "64")
    engines = value["inputs"]["engines"]
    assert [engines[gpu]["batched_tokens"] for gpu in ("h100-sxm", "l40s")] == [8_192, 2_048]
    assert {each["max_seqs"] for each in engines.values()} == {64}


def test_one_pool_says_its_replicas_at_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    value = as_json(
        capsys, "--model", MODEL, "--gpu", "h100-sxm", *ISSUED, "--split", "never", "--tp", "1", "--pp", "1"
    )
    assert value["replicas"] == value["best"]["pools"][0]["replicas"] == 7
    assert value["gpus"] == 7
    assert [each["layout"] for each in value["considered"]] == ["TP1"]


def test_people_see_terms_layouts_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", MODEL, "--gpu", "h100-sxm", *ISSUED, "--split", "never")
    assert status == errors.OK
    for words in (
        "outside utilization share",
        "activation peak",
        "kv cache",
        "layouts",
        "answer: 7 × TP1",
        "binding",
    ):
        assert words in out


def test_what_fits_nowhere_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    big = str(ROOT / "examples" / "models" / "llama-3.1-405b.json")
    status, out, _ = run(capsys, "--model", big, "--gpu", "h100-sxm", *ISSUED, "--max-gpus", "8")
    assert status == errors.FAILED
    assert "fits no layout of up to 8 GPUs" in out
    assert "16 GPUs, would do" in out


def test_more_tokens_than_the_model_can_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--isl", "200000", "--osl", "500", "--rps", "1"]
    status, out, _ = run(capsys, "--model", MODEL, "--gpu", "h100-sxm", *arguments)
    assert status == errors.FAILED
    assert "200,500 tokens exceed the model's context of 131,072" in out


def test_an_slo_that_cannot_be_kept_says_what_could(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--isl", "4000", "--osl", "500", "--rps", "1", "--slo-ttft-ms", "10", "--slo-itl-ms", "1"]
    status, out, _ = run(capsys, "--model", MODEL, "--gpu", "h100-sxm", *arguments)
    assert status == errors.FAILED
    assert "The quickest first token" in out
    assert "The quickest token" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere.json", "--gpu", "h100-sxm"], "cannot read nowhere.json"),
        (["--model", MODEL, "--gpu", "h10"], "no GPU or node type 'h10'; did you mean"),
        (["--model", MODEL, "--gpu", "h100-sxm", "--objective", "cost"], "no price of these is known"),
        (["--model", MODEL, "--gpu", "h100-sxm", "--kv-dtype", "int3"], "'int3' is none of auto"),
        (["--model", MODEL, "--gpu", "h100-sxm", "--profile", "nowhere.csv"], "cannot read nowhere.csv"),
    ],
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    status, _, err = run(capsys, *arguments, *ISSUED)
    assert status == errors.USAGE
    assert said in " ".join(err.split())


def test_a_profile_moves_the_answer_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "mine.csv"
    profile.write_text(
        "gpu,kind,seconds,tp,sequences,context\nh100-sxm,decode,0.016,1,1,1000\nh100-sxm,decode,0.04,1,64,2000\n"
    )
    arguments = ["--model", MODEL, "--gpu", "h100-sxm", *ISSUED, "--split", "never", "--tp", "1", "--pp", "1"]
    value = as_json(capsys, *arguments, "--profile", str(profile))
    assert value["measured"]["h100-sxm"]["taken"] == 2
    assert value["measured"]["h100-sxm"]["decode"] > 1.3
    assert value["replicas"] > 7


def test_a_layout_that_none_can_have_is_told_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", MODEL, "--gpu", "h100-sxm", *ISSUED, "--tp", "32")
    assert status == errors.FAILED
    assert "answer: none. No layout is as asked for" in out
    assert "fits no layout" not in out


OWN = """\
name: own
gpu_types:
  rtx-4090: {memory_gb: 24, memory_gb_per_s: 1008, max_w: 450, pcie_gb_per_s: 32, tflops: {bf16: 165.2, fp8: 330.3}}
node_types:
  desk: {gpu: rtx-4090, gpus: 2, height_u: 4, weight_kg: 30, max_kw: 1.5, cost_per_hour: 1}
  pairs: {like: hgx-h100, height_u: 4, scale_up: [[0, 1], [2, 3], [4, 5], [6, 7]]}
  front: {height_u: 1, weight_kg: 15, max_kw: 0.5}
  small: {like: hgx-h100, gpus: 4, numa: [0, 0, 1, 1], pcie_roots: [0, 1, 2, 3], cost_per_hour: 8}
sites: {s: {racks: {r1: {nodes: {"n[1-2]": desk, n3: pairs}}, r2: {nodes: {n4: small}}}}}
"""


def test_types_of_a_facility_are_sized_by_their_figures_and_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    own = ["--facility", str(tmp_path / "own.yaml"), "--objective", "cost"]
    value = as_json(capsys, "--model", MODEL, "--gpu", "rtx-4090", *own, "--isl", "500", "--osl", "100", "--rps", "1")
    assert value["best"]["pools"][0]["memory"]["total_bytes"] == 24_000_000_000
    assert value["best"]["cost_per_hour"] == value["gpus"] * 0.5
    _, _, err = run(capsys, "--model", MODEL, "--gpu", "pairs", *own, *ISSUED)
    assert "no price of these is known" in err


def test_nvlink_reaches_as_far_as_it_stands_in_the_facility(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    own = ["--facility", str(tmp_path / "own.yaml")]
    tried = as_json(capsys, "--model", MODEL, "--gpu", "pairs", *own, *ISSUED)["considered"]
    assert {each["tp"] for each in tried} == {1, 2}
    # Of a GPU's hosts those that stand there, not the catalogue's.
    pools = as_json(capsys, "--model", MODEL, "--gpu", "h100-sxm", *own, *ISSUED)["best"]["pools"]
    assert {pool["node"] for pool in pools} <= {"pairs", "small"}


def test_hosts_without_gpus_are_not_offered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    _, _, err = run(capsys, "--model", MODEL, "--gpu", "front", "--facility", str(tmp_path / "own.yaml"), *ISSUED)
    assert "there are a100-sxm-80gb, b200-sxm" in " ".join(err.split())


def test_a_load_of_nearly_nothing_is_not_simulated_for_years(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--isl", "1000", "--osl", "100", "--rps", "0.000001"]
    status, _, err = run(capsys, "--model", MODEL, "--gpu", "h100-sxm", *load, "--split", "never", "--check")
    assert status == errors.USAGE
    assert "below 0.01 requests/s is not simulated" in err
