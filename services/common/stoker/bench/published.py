"""Published traces, read line by line as they are needed, never whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path

from stoker.bench.replicas import Job
from stoker.bench.traces import numbered_key
from stoker.common.errors import InvalidRequest

_BLOCK = 512
_MOST_TOKENS = 10_000_000
_LONGEST_PAUSE_S = 31 * 86_400.0
"""A mistaken date is found out here, and not by waiting for it in simulated time."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def azure(path: Path) -> Iterator[Job]:
    """Read an Azure LLM inference trace (CSV: arrival, prompt tokens, generated tokens). No prompt shares anything.

    Raises InvalidRequest naming the line that is no request.
    """
    with _opened(path) as lines:
        rows = csv.reader(lines)
        if tuple(next((row for _, row in _numbered(path, rows, 1)), ())) != _AZURE:
            raise _wrong(path, 1, f"the header is not {','.join(_AZURE)}", "--format mooncake or stoker?")
        began: datetime | None = None
        before = 0.0
        for number, row in _numbered(path, rows, 2):
            try:
                at, prompt, output = _arrival(row[0]), int(row[1]), int(row[2])
                began = began or at
                seconds = (at - began).total_seconds()
            except (ValueError, IndexError, TypeError) as error:
                raise _wrong(path, number, f"{','.join(row)!r} is no request ({error})", "cut or mend it") from error
            _check(path, number, before, seconds, prompt, output)
            before = seconds
            yield Job(seconds, (), prompt, output, own_blocks=_blocks(prompt + output))


def _numbered(path: Path, rows: Iterator[list[str]], first: int) -> Iterator[tuple[int, list[str]]]:
    """Rows with their lines, as long as they are CSV."""
    for number in count(first):
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise _wrong(path, number, f"it is no CSV ({error})", "cut or mend it") from error
        if row is None:
            return
        yield number, row


def _check(path: Path, line: int, before: float, at: float, prompt: int, output: int) -> None:
    """Raise InvalidRequest where a request can be none that somebody sent then."""
    if at < before:
        raise _wrong(path, line, "it goes back in time", "sort the file by arrival")
    if not at - before <= _LONGEST_PAUSE_S:
        days = (at - before) / 86_400.0
        raise _wrong(path, line, f"it comes {days:,.0f} days after the one before", "mend its time, or cut there")
    for tokens in (prompt, output):
        if not 0 <= tokens <= _MOST_TOKENS:
            raise _wrong(path, line, f"it has {tokens:.4g} tokens; 0 to {_MOST_TOKENS:,} can be", "cut or mend it")


def _arrival(text: str) -> datetime:
    """Seven digits behind the point, as the trace of 2023 has them, are one too many."""
    return datetime.fromisoformat(text[:26] if "+" not in text else text)


def mooncake(path: Path) -> Iterator[Job]:
    """Read a Mooncake trace (JSON lines); each `hash_id` stands for a block of 512 tokens.

    Raises InvalidRequest naming the line that is no request.
    """
    before = 0.0
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                seconds = row["timestamp"] / 1_000.0
                prompt, output = int(row["input_length"]), int(row["output_length"])
                keys = tuple(numbered_key(hash_id) for hash_id in row["hash_ids"])
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise _wrong(path, number, f"it is no Mooncake request ({error!r})", "cut or mend it") from error
            _check(path, number, before, seconds, prompt, output)
            before = seconds
            yield Job(seconds, keys, prompt, output, own_blocks=max(0, _blocks(prompt + output) - len(keys)))


def mooncake_prompts(path: Path) -> list[Job]:
    """The prompts of a Mooncake trace: nothing is generated. Raises as `mooncake` does."""
    return [replace(job, output_tokens=0, own_blocks=0) for job in mooncake(path)]


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)


def _opened(path: Path):  # type: ignore[no-untyped-def]
    """What is no UTF-8 stays visible in the line that holds it."""
    try:
        return path.open(encoding="utf-8", errors="backslashreplace", newline="")
    except OSError as error:
        raise InvalidRequest.field("trace", f"cannot read {path}: {error.strerror}; name a file") from error


def _wrong(path: Path, line: int, what: str, fix: str) -> InvalidRequest:
    return InvalidRequest.field("trace", f"{path}:{line}: {what}; {fix}")
