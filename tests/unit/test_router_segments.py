"""Texts cut at special tokens have the ids of the whole, and what was seen is not tokenized again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stoker.local.model import cached
from stoker.router.prompts.segments import SegmentedEncoder, TooMuchNew
from tests.support.engines import TINY


def tiny() -> Tokenizer:
    return Tokenizer.from_file(str(cached(TINY) / "tokenizer.json"))


class Counting:
    """A tokenizer that counts what it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> Any:
        self.asked += texts
        return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)


def whole(tokenizer: Tokenizer, text: str, *, special: bool) -> array[int]:
    return array("I", tokenizer.encode(text, add_special_tokens=special).ids)


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def chat(turns: int, token: str, rng: Random) -> list[str]:
    """The prompts of a conversation, each with all before it."""
    said, prompts = "", []
    for turn in range(turns):
        said += (
            f"{token}user\n" + " ".join(rng.choices(["gauge", "tide", "é", "漢字", "42", "\n"], k=120)) + f" {turn}"
        )
        prompts.append(said + token)
    return prompts


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_put_together_are_the_whole(seed: int, special: bool) -> None:
    tokenizer, rng = tiny(), Random(seed)
    encoder = SegmentedEncoder(tokenizer)
    assert encoder.segments
    tokens = special_tokens(tokenizer)
    for _ in range(40):
        parts = rng.choices(["a gauge ", " ", "\n\n", "漢字", "x" * 70, "<|", "|>", "é " * 30, *tokens], k=30)
        text = "".join(parts)
        assert encoder.encode(text, add_special_tokens=special) == whole(tokenizer, text, special=special), text


def test_a_chats_next_turn_tokenizes_what_is_new() -> None:
    counting = Counting(tiny())
    encoder = SegmentedEncoder(counting)  # type: ignore[arg-type] # looks like one
    token = special_tokens(tiny())[0]
    for prompt in chat(6, token, Random(1)):
        counting.asked.clear()
        assert encoder.encode(prompt) == whole(tiny(), prompt, special=True)
        assert 0 < sum(map(len, counting.asked)) < 1_000


def test_what_is_remembered_is_bounded() -> None:
    counting = Counting(tiny())
    encoder = SegmentedEncoder(counting, remembered_chars=2_000)  # type: ignore[arg-type] # looks like one
    token = special_tokens(tiny())[0]
    texts = [f"{token}{number} " + "a " * 240 for number in range(20)]
    for text in texts:
        encoder.encode(text)
    assert encoder._chars <= 2_000
    counting.asked.clear()
    encoder.encode(texts[-1])
    assert counting.asked == []
    encoder.encode(texts[0])
    assert texts[0].removeprefix(token).startswith(counting.asked[0])


def test_a_tokenizer_whose_pieces_depend_on_their_place_is_asked_for_the_whole() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "b": 4, "▁b": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    encoder = SegmentedEncoder(tokenizer)
    assert not encoder.segments
    text = "a b<s>a b" * 100
    assert encoder.encode(text) == whole(tokenizer, text, special=True)


def test_a_tokenizer_without_special_tokens_or_with_greedy_ones_is_asked_for_the_whole() -> None:
    plain = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    assert not SegmentedEncoder(plain).segments
    plain.add_special_tokens([AddedToken("<s>", rstrip=True, normalized=False, special=True)])
    assert not SegmentedEncoder(plain).segments


def test_ids_put_around_a_text_stay_around_it() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 2), ("</s>", 3)])
    encoder = SegmentedEncoder(tokenizer)
    assert encoder.segments
    text = "ab" * 200 + "<s>" + "ba" * 20
    for special in (True, False):
        assert encoder.encode(text, add_special_tokens=special) == whole(tokenizer, text, special=special)


# --- what is cut between special tokens ----------------------------------------------------------------------


def test_a_plain_texts_new_tail_is_tokenized_alone() -> None:
    counting = Counting(tiny())
    encoder = SegmentedEncoder(counting)  # type: ignore[arg-type] # looks like one
    assert encoder.chunks
    rng = Random(2)
    shared = " ".join(rng.choices(["gauge", "tide", "(é,", "漢字", "42", "\n"], k=8_000))
    for number in range(3):
        text = shared + f" {number} " + " ".join(rng.choices(["rope", "keel,", "x=1"], k=100))
        counting.asked.clear()
        assert encoder.encode(text) == whole(tiny(), text, special=True)
        assert number == 0 or sum(map(len, counting.asked)) < len(text) - len(shared) + 2_200


def test_of_a_long_text_with_another_end_little_more_than_that_is_tokenized() -> None:
    counting, rng = Counting(tiny()), Random(5)
    encoder = SegmentedEncoder(counting)  # type: ignore[arg-type] # looks like one
    text = " ".join(rng.choices(["gauge", "tide", "(é,", "漢字", "42"], k=15_000))
    encoder.encode(text)
    for cut in (7, 300, 900):  # the last within the last chunk or before it
        counting.asked.clear()
        other = f"{text[:-cut]} rope"
        assert encoder.encode(other) == whole(tiny(), other, special=True)
        assert sum(map(len, counting.asked)) < 200, cut


def test_a_text_of_which_too_much_is_new_is_not_tokenized_at_all() -> None:
    counting, rng = Counting(tiny()), Random(6)
    encoder = SegmentedEncoder(counting)  # type: ignore[arg-type] # looks like one
    text = " ".join(rng.choices(["gauge", "tide", "42"], k=2_000))
    counting.asked.clear()
    with pytest.raises(TooMuchNew):
        encoder.encode(text, most_new=1_000)
    assert counting.asked == []
    encoder.encode(text)
    assert encoder.encode(f"{text} rope", most_new=200) == whole(tiny(), f"{text} rope", special=True)


def test_texts_alike_up_to_anywhere_have_alike_chunks_up_to_there() -> None:
    encoder, rng = SegmentedEncoder(tiny()), Random(3)
    text = " ".join(rng.choices(["gauge", "tide", "a.b", "--", "漢字。", "\n"], k=15_000))
    chunks = encoder._chunks_of(text)
    assert "".join(chunks) == text
    assert max(map(len, chunks)) < 2_100
    assert max(map(len, chunks[:50])) < 550
    for end in range(0, len(text), 997):
        kept = [chunk for chunk, begins in zip(chunks, _starts(chunks), strict=True) if begins + 2_100 < end]
        assert encoder._chunks_of(text[:end])[: len(kept)] == kept


def _starts(chunks: list[str]) -> list[int]:
    return [sum(map(len, chunks[:number])) for number in range(len(chunks))]


def test_small_pieces_count_for_more_than_their_characters() -> None:
    encoder = SegmentedEncoder(tiny(), remembered_chars=50_000)
    token = special_tokens(tiny())[0]
    for start in range(0, 4_000, 100):
        encoder.encode(token.join(map(str, range(start, start + 100))))
    assert len(encoder._pieces) <= 250
