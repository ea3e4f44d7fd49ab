"""A text cut where its tokenizer always cuts has the ids of the whole, or the tokenizer is not cut at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from stoker.router.prompts.boundaries import _FRAGMENTS, boundaries
from stoker.router.prompts.segments import SegmentedEncoder

UNKNOWN = "<unk>"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
QWEN = LLAMA_3.replace("{1,3}", "")
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _TAIL,
)
SUPERWORDS = r"\p{L}+(?: \p{L}+)?|\s+|[^\s\p{L}]+"
TEXTS = [(Path(__file__).parents[2] / name).read_text() for name in ("README.md", "CONTRIBUTING.md")]


def _splitting(*patterns: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _trained(model: Any, trainer: Any, split: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([*TEXTS, "漢字 かな 한국어 é 。，"], trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    return tokenizer


def _byte_level(split: Any, normalizer: Any = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), trainer, split, normalizer)


def _bpe(split: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[UNKNOWN], show_progress=False)
    return _trained(models.BPE(unk_token=UNKNOWN, fuse_unk=True), trainer, split)


def _marked(normalizer: Any, split: Any = None) -> Tokenizer:
    """Trained on words, and then shown whole texts, as tokenizers of sentencepiece are."""
    tokenizer = _bpe(pre_tokenizers.Metaspace())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def _unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=[UNKNOWN], unk_token=UNKNOWN, show_progress=False
    )
    return _trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())


def _wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=[UNKNOWN], show_progress=False)
    model = models.WordPiece(unk_token=UNKNOWN)
    return _trained(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def _words() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=900, special_tokens=[UNKNOWN], show_progress=False)
    return _trained(models.WordLevel(unk_token=UNKNOWN), trainer, pre_tokenizers.Whitespace())


def _to_mark(*first: Any) -> Any:
    return normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])


CUT: dict[str, Callable[[], Tokenizer]] = {
    "llama 3": lambda: _byte_level(_splitting(LLAMA_3)),
    "qwen": lambda: _byte_level(_splitting(QWEN), normalizers.NFC()),
    "o200k": lambda: _byte_level(_splitting(O200K)),
    "deepseek": lambda: _byte_level(_splitting(*DEEPSEEK), normalizers.Sequence([])),
    "gpt 2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt 2, prefixed": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "compatible": lambda: _byte_level(_splitting(LLAMA_3), normalizers.Sequence([normalizers.NFKC()])),
    "decomposed": lambda: _byte_level(
        _splitting(QWEN), normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    ),
    "words marked": lambda: _bpe(pre_tokenizers.Metaspace()),
    "texts marked": lambda: _marked(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "llama 2": lambda: _marked(_to_mark(normalizers.Prepend("▁"))),
    "gemma": lambda: _marked(_to_mark(), pre_tokenizers.Split(" ", "merged_with_previous")),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "words": _words,
}


def _with(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def _dropping() -> Tokenizer:
    tokenizer = _byte_level(_splitting(LLAMA_3))
    tokenizer.model.dropout = 0.1
    return tokenizer


WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "merges over spaces": lambda: _bpe(pre_tokenizers.Metaspace(split=False)),
    "superwords": lambda: _byte_level(_splitting(SUPERWORDS)),
    "digits alone": lambda: _byte_level(_splitting(r"\p{N}{1,3}")),
    "strips": lambda: _byte_level(_splitting(LLAMA_3), normalizers.Strip()),
    "rewrites": lambda: _byte_level(_splitting(LLAMA_3), normalizers.Replace(Regex("a +b"), "ab")),
    "prepends": lambda: _byte_level(_splitting(LLAMA_3), normalizers.Prepend("x")),
    "scripts": lambda: _bpe(pre_tokenizers.UnicodeScripts()),
    "a token of two words": lambda: _with(_byte_level(_splitting(LLAMA_3)), AddedToken("the router")),
    "a token over a mark": lambda: _with(_byte_level(_splitting(LLAMA_3)), AddedToken("i.e")),
    "a token that takes spaces": lambda: _with(_byte_level(_splitting(LLAMA_3)), AddedToken("tide", rstrip=True)),
    "drops": _dropping,
}


@functools.cache
def _built(kind: str) -> tuple[Tokenizer, SegmentedEncoder]:
    tokenizer = (CUT | WHOLE)[kind]()
    return tokenizer, SegmentedEncoder(tokenizer)


def _ids(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


texts = st.lists(
    st.sampled_from([*_FRAGMENTS, " ", ", ", " of", "<s>", "</s>", " a ", "b"]) | st.text(max_size=4),
    min_size=1,
    max_size=40,
).map("".join)


@pytest.mark.parametrize("kind", CUT)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_known_tokenizers_are_cut_and_their_pieces_are_the_whole(kind: str, text: str) -> None:
    tokenizer, encoder = _built(kind)
    assert encoder.chunks
    found = boundaries(tokenizer)
    assert found is not None
    if "<s>" not in text and "</s>" not in text:
        pieces = [token for piece in found.split(text) for token in _ids(tokenizer, piece, special=False)]
        assert pieces == _ids(tokenizer, text, special=False)
    text *= 1 + 1_500 // max(1, len(text))
    for special in (True, False):
        assert list(encoder.encode(text, add_special_tokens=special)) == _ids(tokenizer, text, special=special)


@pytest.mark.parametrize("kind", WHOLE)
def test_tokenizers_that_may_join_words_are_not_cut(kind: str) -> None:
    tokenizer, encoder = _built(kind)
    assert boundaries(tokenizer) is None
    assert not encoder.chunks


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind != "drops"])
@settings(max_examples=10, deadline=None)
@given(text=texts)
def test_and_their_ids_are_the_whole_s(kind: str, text: str) -> None:
    tokenizer, encoder = _built(kind)
    text *= 1 + 1_500 // max(1, len(text))
    for special in (True, False):
        assert list(encoder.encode(text, add_special_tokens=special)) == _ids(tokenizer, text, special=special)


def test_a_description_that_is_believed_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.router.prompts.boundaries._splits", lambda step: True)
    tokenizer = _byte_level(_splitting(SUPERWORDS))
    assert boundaries(tokenizer) is not None
    assert not SegmentedEncoder(tokenizer).chunks
