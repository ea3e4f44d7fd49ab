"""Where a tokenizer always cuts a text, whatever stands around: read from its own description.

A pre-tokenizer takes a text apart before the model sees it. What the model makes of each part depends on that part
alone, so a text cut between two parts has the ids of the whole. Only descriptions that are known to the letter are
believed; any other tokenizer gets its texts whole. Why each of them always cuts here:

- No alternative of the known patterns goes on past a space that follows something visible, none looks back, and none
  but white space looks ahead.
- Nor does one that ends in letters take in a comma, full stop or quote behind them.
- Where spaces become "▁" and nothing is taken apart, no token of the vocabulary has a "▁" behind something visible:
  no merge crosses the cut.
- A space composes with nothing before it in any Unicode normal form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, models

_SPACES = r"(?<=[!-~]) (?=[!-~])"
"""A space between two visible characters, left out: where each text gets one in front of it."""
_BEFORE_SPACES = r"(?= [!-~])(?<=[!-~])"
_BEFORE_MARKS = r'(?=[,."])(?<=[A-Za-z])|(?=[，。、！？：；])(?<=[一-鿿ぁ-ゖァ-ヺ가-힣])'
_BEFORE_ANY = rf'(?=[ ,."，。、！？：；])(?:{_BEFORE_SPACES}|{_BEFORE_MARKS})'  # one look at most characters

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_KNOWN_ALTERNATIVES = frozenset(
    (
        *_CONTRACTION.split("|"),
        f"(?i:{_CONTRACTION})",
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
        "'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        *_CASED,
        *(f"{cased}(?i:{_CONTRACTION})?" for cased in _CASED),
        r"[一-龥぀-ゟ゠-ヿ]+",
        r" ?\p{N}+",
        r"\p{N}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LOCAL_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"))
_LOCAL_SPLITS = frozenset(("Isolated", "Removed", "Contiguous"))
_TO_SPACE_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPACE_MARK = {"type": "Prepend", "prepend": "▁"}
_CROSSES = re.compile("[!-~][ ▁]")


def boundaries(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches where texts may be cut: with nothing, or with the space that is left out. None where nowhere."""
    pattern = _sites(tokenizer)
    if pattern is None:
        return None
    found, normalizer = re.compile(pattern), tokenizer.normalizer
    for token in tokenizer.get_added_tokens_decoder().values():
        seen = token.content if normalizer is None else normalizer.normalize_str(token.content)
        # It would be found in a whole text, and not in one that is cut within it; or takes what stands behind it.
        if token.rstrip or any(_CROSSES.search(form) or found.search(form) for form in (token.content, seen)):
            return None
    return found


def _sites(tokenizer: Tokenizer) -> str | None:
    model = tokenizer.model
    if getattr(model, "dropout", None):
        return None
    steps = list(_flat(_described(tokenizer.pre_tokenizer), "pretokenizers"))
    normalizers = _flat(_described(tokenizer.normalizer), "normalizers")
    rest = [step for step in normalizers if step["type"] not in _LOCAL_NORMALIZERS]
    if _marks_spaces(rest, steps):
        vocabulary = tokenizer.get_vocab()
        if not isinstance(model, models.BPE) or "▁" not in vocabulary or any(map(_CROSSES.search, vocabulary)):
            return None
        return _SPACES if _SPACE_MARK in rest else _BEFORE_SPACES
    kinds = [_kind(step) for step in steps]
    if rest or None in kinds or not any(kinds):
        return None
    marks = all(step["type"] in ("Split", "ByteLevel", "Digits") for step in steps)
    prefixed = any(step.get("add_prefix_space") for step in steps)
    return _BEFORE_ANY if marks and not prefixed else _BEFORE_SPACES


def _described(step: Any) -> dict[str, Any] | None:
    """A step as tokenizer.json writes it. The whole file would be rewritten for `to_str`: megabytes of vocabulary."""
    described: dict[str, Any] | None = None if step is None else json.loads(step.__getstate__())
    return described


def _flat(step: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for member in step[members]:
            yield from _flat(member, members)
    else:
        yield step


def _marks_spaces(normalizers: list[Mapping[str, Any]], steps: list[Mapping[str, Any]]) -> bool:
    """Whether spaces become "▁", and the model sees the text whole."""
    if _TO_SPACE_MARK in normalizers:  # then to split at spaces is to split nowhere
        steps = [step for step in steps if (step["type"], step.get("pattern")) != ("Split", {"String": " "})]
    if steps:
        (first, *others) = steps
        return not normalizers and not others and first["type"] == "Metaspace" and not first.get("split", True)
    return _TO_SPACE_MARK in normalizers and all(step in (_TO_SPACE_MARK, _SPACE_MARK) for step in normalizers)


def _kind(step: Mapping[str, Any]) -> bool | None:
    """Whether a step cuts before each such space by itself; None where it may join what is on both sides of it."""
    match step["type"]:
        case "ByteLevel":
            return bool(step.get("use_regex", True))
        case "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer":
            return True
        case "Metaspace":
            return True if step["replacement"] == "▁" and step.get("split", True) else None
        case "Digits":
            return False
        case "Punctuation":
            return False if step.get("behavior", "Isolated") in _LOCAL_SPLITS else None
        case "Split":
            return _splits(step)
    return None


def _splits(step: Mapping[str, Any]) -> bool | None:
    pattern = step["pattern"].get("Regex")
    kept = (step["behavior"], bool(step["invert"])) in (("Isolated", False), ("Removed", True))
    if pattern is None or not kept:
        return None
    alternatives = set(_alternatives(pattern))
    return r"\s+" in alternatives if alternatives <= _KNOWN_ALTERNATIVES else None


def _alternatives(pattern: str) -> Iterator[str]:
    """A pattern's alternatives at its top, as they are written."""
    start = depth = place = 0
    in_class = False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            yield pattern[start:place]
            start = place + 1
        place += 1
    yield pattern[start:]


_FRAGMENTS = (
    *("a", "The", "tide's", "DON'T", "x1", "42", "3.14", "1,000", "GAUGE", "naïve", "it’ll", "Ωmega", "I'm"),
    *("foo(bar)", "x==y", "{", "}", '"key":', "'s", "'", "--", "...", "#", "/", "\\n", "http://a.b/c?d=e", "_", "~"),
    *("\n", "\r\n", "\t", "  ", " ", "\n\n  ", ""),
    *("漢字", "かな", "ガ", "か\u3099", "한국어", "。", "，是", "“”", "…", "é", "e\u0301", "\u0301", "ﬁ", "Ａ"),
    *("🙂", "👩‍👩‍👧", "\u200b", "\u00a0", "▁", "<", ">", "É"),
)
_PROSE = (
    'The tide, she said, "is late." It\'s 7:45 now.\n\n- first  point: done;\n'
    '\treturn f(x) if y else {"a": 1, "b":"c"}\r\n第一，他说。第二、谁？ 그는 말했다, 네. naïve cafe\u0301 ﬁne 12345 '
    "6 🙂 ok 🙂ok a\u0301 b I'LL we'd 'tis\n    x += 1  # no.\n"
)


def proofs() -> list[str]:
    """Texts in which whatever may stand beside a boundary stands there: a proof is to have them as whole as cut."""
    pairs = [f"{one}{between}{other}" for one in _FRAGMENTS for other in _FRAGMENTS for between in (" ", "")]
    around = [f"of {one} a {one}, b{one} " for one in _FRAGMENTS]
    return [*pairs, *around, *(_PROSE[start:] + _PROSE[:start] for start in range(0, len(_PROSE), 7))]
