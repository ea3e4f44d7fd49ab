"""The order in which people read names: rack-2 before rack-10."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"(\d+)", re.ASCII)
_MOST_DIGITS = 4000  # of one number: Python reads no more at once


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by, numbers in them as numbers; equal for equal names alone, not for n1 and n01."""
    parts = _DIGITS.split(name)
    return [(0, 0, part) if at % 2 == 0 else (1, int(part[:_MOST_DIGITS]), part) for at, part in enumerate(parts)]
