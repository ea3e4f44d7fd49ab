"""From config.json to parameters and bytes: against what publishers say of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.planner.core.sizing.architecture import Model
from stoker.planner.model_config import BadModelConfig, parse, read

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"

PUBLISHED_PARAMETERS = {
    # In billions, by the models' cards and reports.
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "gemma-2-9b": 9.24,
    "gemma-3-27b": 27.4,
    "gpt-oss-120b": 116.83,
    "gpt-oss-20b": 20.91,
    "kimi-k2": 1_026.0,
    "llama-3.1-405b": 405.9,
    "llama-3.1-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-4-scout": 109.0,
    "mistral-7b-v0.1": 7.24,
    "mistral-small-24b": 23.57,
    "mixtral-8x7b": 46.7,
    "qwen2.5-72b": 72.7,
    "qwen3-235b-a22b": 235.0,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
}
PUBLISHED_ACTIVE = {
    "deepseek-v3": 37.0,
    "gpt-oss-120b": 5.13,
    "gpt-oss-20b": 3.61,
    "kimi-k2": 32.0,
    "mixtral-8x7b": 12.9,
}
KV_BYTES_PER_TOKEN = {
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "mistral-small-24b": 163_840,
    "gpt-oss-120b": 73_728,
    "deepseek-v3": 70_272,
}


def example(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return config


def changed(name: str, **keys: Any) -> Model:
    config = example(name) | keys
    return parse({key: value for key, value in config.items() if value is not ...}, name=name, source="config.json")


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_PARAMETERS.items())
def test_parameters_are_within_one_percent_of_what_is_published(name: str, billions: float) -> None:
    assert read(MODELS / f"{name}.json").parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_ACTIVE.items())
def test_active_parameters_are_near_what_is_published(name: str, billions: float) -> None:
    assert read(MODELS / f"{name}.json").active_parameters == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(("name", "expected"), KV_BYTES_PER_TOKEN.items())
def test_kv_bytes_per_token_are_exact(name: str, expected: int) -> None:
    assert read(MODELS / f"{name}.json").kv_bytes_per_token == expected


def test_every_example_is_read() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} >= set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-120b", 65.25),  # the checkpoint is 60.8 GiB (model card, arXiv:2508.10925 table 1)
        ("gpt-oss-20b", 13.76),  # 12.8 GiB, the same table
        ("llama-3.1-8b-awq", 5.73),  # the size of hugging-quants' AWQ-INT4 repository
        ("llama-3.3-70b-fp8", 72.7),  # the size of RedHatAI's FP8-dynamic repository
        ("llama-3.1-70b", 141.1),  # two bytes each
    ],
)
def test_weight_bytes_of_quantized_models(name: str, gigabytes: float) -> None:
    assert read(MODELS / f"{name}.json").weight_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)


def test_an_fp8_cache_is_half_as_large() -> None:
    assert read(MODELS / "llama-3.1-8b.json", kv_dtype="fp8").kv_bytes_per_token == 65_536


def test_windows_by_layer_types_by_pattern_and_for_all() -> None:
    oss = read(MODELS / "gpt-oss-120b.json")
    assert [run.attention.window for run in oss.layers][:4] == [128, 0, 128, 0]
    assert oss.hybrid
    gemma = read(MODELS / "gemma-3-27b.json")
    assert sum(run.count for run in gemma.layers if not run.attention.window) == 10
    mistral = read(MODELS / "mistral-7b-v0.1.json")
    assert {run.attention.window for run in mistral.layers} == {4_096}
    assert not mistral.hybrid
    assert not any(run.attention.window for run in read(MODELS / "qwen2.5-72b.json").layers)


def test_the_first_layers_of_deepseek_are_dense() -> None:
    first, rest = read(MODELS / "deepseek-v3.json").layers
    assert (first.count, first.feed_forward.experts) == (3, 0)
    assert (rest.count, rest.feed_forward.experts, rest.feed_forward.active) == (58, 256, 8)


def test_the_index_of_safetensors_beside_it_is_taken_along(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(example("llama-3.1-8b")))
    assert read(tmp_path).stored is None
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}}')
    assert read(tmp_path / "config.json").stored == 16_060_522_496
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": "much"}}')
    with pytest.raises(BadModelConfig, match="total_size"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_size": ...}, r"config.json: hidden_size: missing.*take the config.json as"),
        ({"hidden_size": "wide"}, "hidden_size: 'wide' is no whole number"),
        ({"hidden_size": -1}, "hidden_size: '-1'"),
        ({"hidden_size": True}, "hidden_size: 'True'"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size: 'nan'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: .* 1 to 1000"),
        ({"num_key_value_heads": 7}, "7 does not divide the 32"),
        ({"tie_word_embeddings": "no"}, "neither true nor false"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention: unsupported, what such layers"),
        ({"mamba_d_state": 128}, "state-space layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "float1"}, "float1"),
        ({"quantization_config": {"quant_method": "magic"}}, "'magic' is not known here; known: fp8"),
        ({"quantization_config": "fp8"}, "expected an object"),
        ({"quantization_config": {"quant_method": "awq", "bits": 5}}, "bits: '5' is none of"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "no group says"),
    ],
)
def test_what_is_wrong_is_named_with_its_key_and_what_to_do(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(BadModelConfig, match=said):
        changed("llama-3.1-8b", **keys)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(BadModelConfig) as caught:
        changed("llama-3.1-8b", hidden_size=None, vocab_size="many")
    assert len(caught.value.message.splitlines()) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"[]", b"\xff\xfe", b"null", b'{"a": 1}', b" " * 2_000_000]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadModelConfig, match=r"config\.json"):
        read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadModelConfig, match="cannot read"):
        read(tmp_path / "nothing.json")


def test_an_unknown_model_type_is_sized_by_its_keys_and_says_so() -> None:
    model = changed("llama-3.1-8b", model_type="newest")
    assert model.parameters == pytest.approx(8.03e9, rel=0.001)
    assert "newest" in model.notes[0]


def test_what_a_quantization_leaves_out_stays_as_it_is() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "model.layers.3.mlp.gate_proj"],
    }
    (run,) = changed("llama-3.1-8b", quantization_config=scheme).layers
    assert run.attention.format.name == "bf16"
    # One layer of many says nothing of the kind.
    assert run.feed_forward.format.bits == 4.0 + 16.0 / 128
    (whole,) = changed("llama-3.1-8b", quantization_config=scheme | {"ignore": []}).layers
    assert whole.attention.format.name == "int4"


@pytest.mark.parametrize(
    ("scheme", "bits", "arithmetic"),
    [
        ({"quant_method": "fp8"}, 8.0, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0, "fp8"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0, "bf16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4.0 + 20.0 / 64, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.127, "bf16"),
    ],
)
def test_bits_and_arithmetic_of_quantizations(scheme: dict[str, Any], bits: float, arithmetic: str) -> None:
    (run,) = changed("llama-3.1-8b", quantization_config=scheme).layers
    assert run.feed_forward.format.bits == pytest.approx(bits)
    assert run.feed_forward.format.arithmetic == arithmetic


def test_a_cache_in_fp8_where_the_weights_come_with_scales_for_it() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert changed("llama-3.1-8b", quantization_config=scheme).kv_bytes_per_token == 65_536


def test_every_fourth_layer_of_llama_4_sees_everything() -> None:
    scout = read(MODELS / "llama-4-scout.json")
    windows = [run.attention.window for run in scout.each_layer()]
    assert windows[:8] == [8_192, 8_192, 8_192, 0] * 2
    assert (scout.layers[0].feed_forward.shared, scout.layers[0].feed_forward.active) == (8_192, 1)


def test_qwen_uses_its_windows_only_when_told_and_above_a_layer() -> None:
    model = changed("qwen2.5-72b", use_sliding_window=True, max_window_layers=70, sliding_window=4_096)
    windows = [run.attention.window for run in model.each_layer()]
    assert windows == [0] * 70 + [4_096] * 10


def test_a_nested_config_is_named_in_errors() -> None:
    config = example("gemma-3-27b")
    config["text_config"]["hidden_size"] = "wide"
    with pytest.raises(BadModelConfig, match=r"config.json: text_config.hidden_size: 'wide'"):
        parse(config, name="x", source="config.json")


def test_files_that_hold_something_else_are_not_believed_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(example("llama-3.1-8b")))
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 32000000000}}')
    model = read(tmp_path)
    assert model.weight_scale == 1.0
    assert "the files hold 32.0 GB" in model.notes[0]


@pytest.mark.parametrize("nested", ["x", [1], 5])
def test_a_nested_quantization_that_is_no_object_says_nothing(nested: Any) -> None:
    scheme = {"quant_method": "modelopt", "quantization": nested}
    assert changed("llama-3.1-8b", quantization_config=scheme).layers[0].attention.format.bits == 8


def test_a_quantization_of_null_hides_no_other() -> None:
    model = changed("llama-3.1-8b", quantization_config=None, compression_config={"quant_method": "fp8"})
    assert model.layers[0].attention.format.bits == 8
