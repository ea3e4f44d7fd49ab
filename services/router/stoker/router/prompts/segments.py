"""Tokenizing only what is new: a text is cut where its tokenizer cuts it anyway, and the pieces are remembered.

A tokenizer takes special tokens out of a text before anything else and tokenizes what lies between them apart, so
the pieces' ids, put together, are the text's. Chat templates put special tokens around every message: a chat's next
turn then costs its new messages. What is longer is cut further, at the first boundary of words behind every so many
characters: what begins as another text did costs its new end, which is cut finer still. Where a tokenizer does not
keep to that, which is tried when it is loaded, texts are tokenized whole.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from tokenizers import Tokenizer

from stoker.router.prompts.boundaries import boundaries, proofs

_REMEMBERED_CHARS = 16_000_000
"""Of all pieces together; ids take about as many bytes again as the characters."""
_ENTRY_CHARS = 200
"""What an entry takes beside its text."""
_SHORTEST = 256
"""Shorter texts are tokenized in less time than they are looked for."""
_CHUNK, _LATER_CHUNK, _LATER = 512, 2_048, 32_768
"""Characters, from the beginning of what stands between special tokens, and behind so many of them: to look for a
chunk takes as long as to tokenize six characters, and half of one is tokenized anew where a text's end is new."""
_FINE = 128
"""Characters of the pieces in which the ends of texts are remembered, and looked for."""
_TRIED = ("a b", " a", "b ", "\n\nc\n", "é漢 x", "1 2", "")


class TooMuchNew(Exception):
    """More of a text was never seen than its caller has time for."""


class SegmentedEncoder:
    """Token ids of texts. Thread-safe; the tokenizer releases the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer, remembered_chars: int = _REMEMBERED_CHARS) -> None:
        """`remembered_chars`: how much text is remembered at most."""
        self._tokenizer = tokenizer
        self._limit = remembered_chars
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()
        self._special = _plain_special_tokens(tokenizer)
        self._frame = self._framing()
        self._boundaries = self._proven_boundaries()
        longest_first = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        if not self._keeps_to_pieces():
            self._cut = None

    @property
    def segments(self) -> bool:
        """Whether texts are cut at special tokens."""
        return self._cut is not None

    @property
    def chunks(self) -> bool:
        """Whether texts are cut at boundaries of words."""
        return self._boundaries is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> array[int]:
        """The token ids of a text, as 32-bit units.

        Raises TooMuchNew, before it tokenizes anything, where more than `most_new` characters were never seen.
        """
        whole = self._cut is None and self._boundaries is None
        if self._frame is None or whole or len(text) < _SHORTEST:
            if most_new is not None and len(text) > most_new:
                raise TooMuchNew
            return array("I", self._whole([text], add_special_tokens=add_special_tokens)[0])
        ids = self._in_pieces(text, most_new)
        if add_special_tokens:
            before, after = (array("I", some) for some in self._frame)
            return before + ids + after
        return ids

    def _in_pieces(self, text: str, most_new: int | None = None) -> array[int]:
        parts = self._cut.split(text) if self._cut is not None else [text]
        pieces = [[parts[number]] if number % 2 else self._chunks_of(part) for number, part in enumerate(parts)]
        plain = dict.fromkeys(chunk for chunks in pieces[::2] for chunk in chunks)
        known = self._recall(plain)
        missing = [chunk for chunk in plain if chunk not in known]
        if missing:
            known |= self._new(missing, most_new)
        # To put arrays together is one copy, and to hash them no further one.
        known |= self._special
        return array("I", b"".join([known[piece] for some in pieces for piece in some]))

    def _new(self, chunks: list[str], most_new: int | None) -> dict[str, array[int]]:
        """The ids of chunks that are not known, the last of which is where most texts end.

        Its end is new to the next text that goes on there, and what stands before that is not.
        """
        fine = {chunk: self._chunks_of(chunk, _FINE) for chunk in (chunks[0], chunks[-1])}
        pieces = dict.fromkeys(piece for chunk in chunks for piece in fine.get(chunk, (chunk,)))
        known = self._recall(dict.fromkeys(piece for some in fine.values() for piece in some))
        missing = [piece for piece in pieces if piece not in known]
        if most_new is not None and sum(map(len, missing)) > most_new:
            raise TooMuchNew
        fresh = {piece: array("I", ids) for piece, ids in zip(missing, self._bare(missing), strict=True)}
        known |= fresh
        found = {
            chunk: array("I", b"".join([known[piece] for piece in fine.get(chunk, (chunk,))])) for chunk in chunks
        }
        ends = {piece: fresh[piece] for piece in fine[chunks[-1]] if piece in fresh}
        self._remember({**{chunk: found[chunk] for chunk in chunks[:-1]}, **ends})
        return found

    def _chunks_of(self, text: str, size: int = 0) -> list[str]:
        """By the text before each cut alone, so that texts that begin alike have the same chunks.

        `size` in characters, 0 for what suits the place in the text.
        """
        if self._boundaries is None or len(text) <= (size or _CHUNK):
            return [text] if text else []
        chunks: list[str] = []
        start = 0
        while True:
            least = size or (_CHUNK if start < _LATER else _LATER_CHUNK)
            cut = self._boundaries.search(text, start + least)
            if cut is None:
                return [*chunks, text[start:]]
            chunks.append(text[start : cut.start()])
            start = cut.end()

    def _bare(self, texts: list[str]) -> list[Sequence[int]]:
        return self._whole(texts, add_special_tokens=False) if texts else []

    def _whole(self, texts: list[str], *, add_special_tokens: bool) -> list[Sequence[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]

    def _recall(self, pieces: dict[str, None]) -> dict[str, array[int]]:
        found: dict[str, array[int]] = {}
        with self._lock:
            for piece in pieces:
                ids = self._pieces.get(piece)
                if ids is not None:
                    self._pieces.move_to_end(piece)
                    found[piece] = ids
        return found

    def _remember(self, fresh: dict[str, array[int]]) -> None:
        with self._lock:
            for piece, ids in fresh.items():
                if piece not in self._pieces:
                    self._chars += len(piece) + _ENTRY_CHARS
                    self._pieces[piece] = ids
            while self._chars > self._limit:
                oldest, _ = self._pieces.popitem(last=False)
                self._chars -= len(oldest) + _ENTRY_CHARS

    def _framing(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """The ids that the tokenizer puts before and after a text of its own accord; None where it does otherwise."""
        bare, framed = (self._whole(["a"], add_special_tokens=special)[0] for special in (False, True))
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        return None

    def _proven_boundaries(self) -> re.Pattern[str] | None:
        """Where texts may be cut, by the tokenizer's description and by trial."""
        found = boundaries(self._tokenizer)
        if found is None or self._frame is None:
            return None
        texts = proofs()
        cut = [found.split(text) for text in texts]
        ids = iter(self._bare([piece for pieces in cut for piece in pieces]))
        before, after = self._frame
        for pieces, whole in zip(cut, self._whole(texts, add_special_tokens=True), strict=True):
            if whole != [*before, *(token for _ in pieces for token in next(ids)), *after]:
                return None
        return found

    def _keeps_to_pieces(self) -> bool:
        if self._cut is None or self._frame is None:
            return False
        token = next(iter(self._special))
        for first in _TRIED:
            for second in _TRIED:
                text = f"{first}{token}{second}{token}{token}{first}"
                whole = self._whole([text], add_special_tokens=True)[0]
                before, after = self._frame
                if whole != [*before, *self._in_pieces(text), *after]:
                    return False
        return True


def _plain_special_tokens(tokenizer: Tokenizer) -> dict[str, array[int]]:
    """Special tokens that are found wherever they stand, and take nothing of what stands beside them."""
    return {
        token.content: array("I", [number])
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
        and token.content
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
