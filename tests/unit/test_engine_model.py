"""The tiny model: whole, repeatable, and careful with what is not its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from stoker.common.errors import InvalidRequest
from stoker.local import model
from stoker.local.model import ModelSpec, build, cached

SMALL = ModelSpec(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64, vocab=512)


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Iterator[None]:
    """A tokenizer trained on less: a tenth of the time, the same paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_MODULES", ("heapq.py", "textwrap.py"))
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "small", SMALL)


def test_the_same_spec_builds_the_same_files(directory: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", SMALL)
    names = sorted(path.name for path in directory.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((directory / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_weights_are_readable_and_depend_on_the_seed(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", framework="np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a dict
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [16, 32]
    raw = (directory / "model.safetensors").read_bytes()
    stored = np.frombuffer(raw[-1024:], dtype="<u2").astype(np.uint32) << 16
    values = stored.view(np.float32)
    assert 0.01 < float(values.std()) < 0.03


def test_the_default_has_about_26_million_parameters() -> None:
    shapes = model._shapes(ModelSpec())
    assert 25e6 < sum(int(np.prod(shape)) for shape in shapes.values()) < 27e6


def test_its_tokenizer_loses_no_text_and_marks_beginnings(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "def main():\n\treturn 'naïve ☕ 漢字'  # <tool_call>{}</tool_call>"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(plain.ids) == text
    marked = tokenizer.encode(text)
    assert marked.ids == [tokenizer.token_to_id(model.BEGIN), *plain.ids]
    assert tokenizer.get_vocab_size() == SMALL.vocab


def test_a_finished_model_is_used_again(tmp_path: Path) -> None:
    first = cached(SMALL, tmp_path)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert cached(SMALL, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_another_spec_replaces_a_model_but_nothing_else(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    build(target, SMALL)
    wider = ModelSpec(**{**vars(SMALL), "intermediate": 96})
    build(target, wider)
    assert json.loads((target / "config.json").read_text())["intermediate_size"] == 96
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("precious")
    with pytest.raises(InvalidRequest, match="not empty"):
        build(mine, SMALL)
    assert (mine / "notes.txt").read_text() == "precious"


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(model, "_write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        build(tmp_path / "model", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_console_says_where_it_is_and_refuses_politely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [f"--{name.replace('_', '-')}={value}" for name, value in vars(SMALL).items()]
    assert model.main([str(tmp_path / "model"), *small]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert model.main([str(tmp_path), *small]) == 2
    assert "not empty" in capsys.readouterr().err
