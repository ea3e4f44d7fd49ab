"""structlog, set up once per process: JSON in services, coloured text on a terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog

from stoker.common.errors import StokerError

# Local variables stay out of the log: they hold prompts.
_TRACEBACK = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


class Steady(io.TextIOBase):
    """A stream whose failures, a full disk's or a closed pipe's, do not become those of the work that is logged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's own, but what it refuses is lost."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream's own, but what it refuses is lost."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            self._stream.flush()


def setup(service: str, level: str = "info") -> None:
    """Configures structlog and the standard library's logging to write one line per event to stderr."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise StokerError(f"log level {level!r} is unknown: use debug, info, warning or error", reason="BAD_CONFIG")
    pretty = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if pretty
        else [structlog.processors.ExceptionRenderer(_TRACEBACK), structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # A line at once: workers share their stderr.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, Steady(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(number, logging.WARNING), format="%(name)s: %(message)s")
