"""How a verb speaks: results on stdout, everything else on stderr.

With `-o json` stdout holds one JSON document and nothing more. Colours and moving progress appear on a
terminal only.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.status import Status


class Format(StrEnum):
    """Form of a verb's result."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[
    Format, typer.Option("-o", "--output", help="Form of the result: text for people, json for programs.")
]

# Without a terminal: how often an unchanged line is repeated, so that a log shows life, and one whose
# subject (what stands before the last colon) stays the same.
_PLAIN_EVERY_S, _PLAIN_COUNT_S = 10.0, 3.0


_PIPED_WIDTH = 1000


def own_name() -> str:
    """How to call this command again: as `make` runs it, no `stoker` is on the PATH."""
    return "stoker" if shutil.which("stoker") else sys.argv[0]


def or_dash(value: Any, form: str = "{}") -> str:
    """A figure in a table's cell: unknown is a dash, which is not zero."""
    return "–" if value is None else form.format(value)


def counted(number: int, what: str) -> str:
    """A count in a sentence: "1 rack", "1,080 GPUs"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


class Progress:
    """One line that says what is being waited for."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last, self._last_at = "", 0.0
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Show `text` as the present state; repeats are cheap."""
        now = time.monotonic()
        if self._status is not None:
            self._status.update(f"{text} [dim]({now - self._began:.0f} s)[/dim]")
        elif now - self._last_at > self._plain_pause_s(text):
            self._last, self._last_at = text, now
            self._console.print(f"[{now - self._began:5.1f} s] {text}", markup=False, highlight=False)

    def _plain_pause_s(self, text: str) -> float:
        """How long to be silent before this text: what only counts up is worth a line now and then."""
        if text == self._last:
            return _PLAIN_EVERY_S
        same_subject = text.rpartition(":")[0] == self._last.rpartition(":")[0] and ":" in text
        return _PLAIN_COUNT_S if same_subject else -1.0


class Verbatim(str):
    """To copy and paste: shown as it is, with no line break of ours in it, however narrow the terminal."""


class Output:
    """Where one verb writes."""

    def __init__(self, form: Format) -> None:
        self.form = form
        piped = not sys.stdout.isatty()
        # A file has no edge: whoever greps it wants each row on a line of its own.
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=piped, width=_PIPED_WIDTH if piped else None)
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())

    @property
    def is_json(self) -> bool:
        """Whether a program reads the result."""
        return self.form is Format.JSON

    def result(self, value: Any, *shown: RenderableType) -> None:
        """The result: `value` as JSON, or `shown` for people."""
        if self.is_json:
            sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            return
        for item in shown:
            if isinstance(item, Verbatim):
                self._out.print(item, markup=False, soft_wrap=True)
            else:
                self._out.print(item)

    def note(self, text: str) -> None:
        """A remark on stderr."""
        self._err.print(text)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A line on stderr for the length of a wait."""
        with Progress(self._err) as progress:
            yield progress
