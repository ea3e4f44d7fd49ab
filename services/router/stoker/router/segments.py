"""Tokenizing only what is new: a text is cut at special tokens, and what lies between is remembered.

A tokenizer takes special tokens out of a text before anything else and tokenizes what lies between them apart, so
the pieces' ids, put together, are the text's. Chat templates put special tokens around every message: a chat's next
turn then costs its new messages. Where a tokenizer does not keep to that, which is tried when it is loaded, texts
are tokenized whole.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from tokenizers import Tokenizer

_REMEMBERED_CHARS = 16_000_000
"""Of all pieces together; ids take about as many bytes again as the characters."""
_SHORTEST = 256
"""Shorter texts are tokenized in less time than they are looked for."""
_TRIED = ("a b", " a", "b ", "\n\nc\n", "é漢 x", "1 2", "")


class SegmentedEncoder:
    """Token ids of texts. Thread-safe; encoding releases the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer, remembered_chars: int = _REMEMBERED_CHARS) -> None:
        """`remembered_chars`: how much text is remembered at most."""
        self._tokenizer = tokenizer
        self._limit = remembered_chars
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()
        self._ids = _plain_special_tokens(tokenizer)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._frame = self._framing()
        if not self._keeps_to_pieces():
            self._cut = None

    @property
    def segments(self) -> bool:
        """Whether texts are cut: False where this tokenizer's texts must be taken whole."""
        return self._cut is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """The token ids of a text, as 32-bit units."""
        if self._cut is None or len(text) < _SHORTEST:
            return array("I", self._whole([text], add_special_tokens=add_special_tokens)[0])
        ids = self._in_pieces(text)
        if add_special_tokens:
            before, after = (array("I", some) for some in self._frame)
            return before + ids + after
        return ids

    def _in_pieces(self, text: str) -> array[int]:
        assert self._cut is not None  # noqa: S101
        parts = self._cut.split(text)
        known = self._recall({part for part in parts[::2] if part})
        missing = list(dict.fromkeys(part for part in parts[::2] if part and part not in known))
        if missing:
            fresh = dict(zip(missing, self._whole(missing, add_special_tokens=False), strict=True))
            known |= fresh
            self._remember(fresh)
        ids = array("I")  # to put arrays together is one copy, and to hash them no further one
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._ids[part])
            elif part:
                ids.extend(known[part])
        return ids

    def _whole(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]

    def _recall(self, pieces: set[str]) -> dict[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            for piece in pieces:
                ids = self._pieces.get(piece)
                if ids is not None:
                    self._pieces.move_to_end(piece)
                    found[piece] = ids
        return found

    def _remember(self, fresh: dict[str, list[int]]) -> None:
        with self._lock:
            for piece, ids in fresh.items():
                if piece not in self._pieces:
                    self._chars += len(piece)
                    self._pieces[piece] = array("I", ids)
            while self._chars > self._limit:
                oldest, _ = self._pieces.popitem(last=False)
                self._chars -= len(oldest)

    def _framing(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text of its own accord."""
        bare, framed = (self._whole(["a"], add_special_tokens=special)[0] for special in (False, True))
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        self._cut = None
        return [], []

    def _keeps_to_pieces(self) -> bool:
        if self._cut is None:
            return False
        token = next(iter(self._ids))
        for first in _TRIED:
            for second in _TRIED:
                text = f"{first}{token}{second}{token}{token}{first}"
                whole = self._whole([text], add_special_tokens=True)[0]
                before, after = self._frame
                if whole != [*before, *self._in_pieces(text), *after]:
                    return False
        return True


def _plain_special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens that are found wherever they stand, and take nothing of what stands beside them."""
    return {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
        and token.content
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
