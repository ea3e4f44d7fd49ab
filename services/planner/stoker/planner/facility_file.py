"""Facility files: YAML in, `Facility` out, every mistake told with its line. docs/facility.md explains the file."""

from __future__ import annotations

from pathlib import Path

from stoker.planner.core.facility.values import Facility


def read(path: Path) -> Facility:
    """The facility in a file, files that it includes read too.

    Raises StokerError (BAD_FILE) that names file and line of every mistake, one a line.
    """
    raise NotImplementedError


def parse(text: str, source: str) -> Facility:
    """The facility in a text that includes no files; `source` names it in errors. Raises as `read` does."""
    raise NotImplementedError
