"""Names in ranges: "r1-[01-16,20]" is r1-01 to r1-16 and r1-20. Slurm's hostlists are written so as well."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import product

from stoker.planner.core.ordering import natural

MOST_NAMES = 100_000
"""More than so many are refused: it is rather a slip than a facility."""

_DIGITS = re.compile(r"(\d+)", re.ASCII)
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_SPAN = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class _TooMany(Exception):
    """More names than are wanted."""


class BadRange(ValueError):
    """A text that is no range of names; the message says why."""


def expand(text: str, most: int = MOST_NAMES) -> list[str]:
    """The names that a text stands for, in its order: parts at commas, each with any number of ranges in brackets.

    The zeros that a range begins with are kept: [08-10] is 08, 09, 10. Raises BadRange, for more than `most` too.
    """
    names: list[str] = []
    for part in _parts(text):
        try:
            names += _expanded(part, most - len(names))
        except _TooMany:
            raise BadRange(f"{part[:80]!r} stands for more than {most} names") from None
    return names


def compressed(names: Iterable[str]) -> list[str]:
    """Texts that `expand` to just these names, each once; names that differ in their last number are put together."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    alone = []
    for name in sorted(set(names), key=natural):
        if _DIGITS.search(name):
            *before, number, after = _DIGITS.split(name)
            groups["".join(before), after].append(number)
        else:
            alone.append(name)
    return alone + [_compressed(before, numbers, after) for (before, after), numbers in groups.items()]


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise BadRange(f"{text[:80]!r} has brackets that do not match")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    if depth:
        raise BadRange(f"{text[:80]!r} has brackets that do not match")
    if not all(parts):
        raise BadRange(f"{text[:80]!r} has an empty name in it")
    return parts


def _expanded(part: str, most: int) -> list[str]:
    pieces: list[list[str]] = []
    total = 1
    for at, piece in enumerate(_GROUP.split(part)):
        values = [piece] if at % 2 == 0 else _numbers(piece, part, most)
        total *= len(values)
        if total > most:
            raise _TooMany
        pieces.append(values)
    return ["".join(chosen) for chosen in product(*pieces)]


def _numbers(spans: str, whole: str, most: int) -> list[str]:
    numbers: list[str] = []
    for span in spans.split(","):
        match = _SPAN.fullmatch(span.strip())
        if match is None:
            raise BadRange(f"{whole[:80]!r}: {span[:40]!r} is no range; write it as [01-16,20]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise BadRange(f"{whole[:80]!r}: {span[:40]!r} runs backwards")
        if int(last) - int(first) >= most - len(numbers):
            raise _TooMany
        numbers += [_like(first, number) for number in range(int(first), int(last) + 1)]
    return numbers


def _like(first: str, number: int) -> str:
    """A number as wide as the first of its range, where that begins with a zero."""
    return str(number).zfill(len(first)) if first.startswith("0") else str(number)


def _compressed(before: str, numbers: list[str], after: str) -> str:
    runs: list[list[str]] = []
    for number in numbers:
        run = runs[-1] if runs else None
        if run and len(number) <= 18 and number == _like(run[0], int(run[-1]) + 1):
            run.append(number)
        else:
            runs.append([number])
    if len(numbers) == 1:
        return f"{before}{numbers[0]}{after}"
    spans = (run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{before}[{','.join(spans)}]{after}"
