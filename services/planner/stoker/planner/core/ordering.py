"""The order in which people read names: rack-2 before rack-10."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key to sort names by, numbers in them as numbers."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in _DIGITS.split(name) if part]
