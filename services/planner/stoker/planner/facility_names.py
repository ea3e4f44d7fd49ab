"""Names in a facility file: ranges spelled out, variables put in, each name given to one thing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stoker.planner.core.facility.ranges import MOST_NAMES, BadRange, expand
from stoker.planner.facility_types import Wrong

Place = Mapping[str, str]
"""Names around something, by kind: {"site": "fra", "row": "r1"}."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,126}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([a-z]+))")
MOST_THINGS = 10 * MOST_NAMES


class TooMany(Exception):
    """The file makes more than any facility has."""


class Names:
    """The names of one file. `paths` says where each that was claimed stands in it."""

    def __init__(self, wrong: Wrong) -> None:
        self.paths: dict[str, str] = {}
        self._wrong = wrong
        self._made = 0

    def expanded(self, pattern: str, path: str, place: Place) -> list[str]:
        """The names that a pattern stands for; what is wrong with it is told, and then there are none."""
        text = self.filled_in(pattern, path, place)
        try:
            names = expand(text, MOST_NAMES)
        except BadRange as error:
            self._wrong(path, str(error))
            return []
        self.count(len(names), path)
        return names if all(self.proper(name, path) for name in names) else []

    def proper(self, name: str, path: str) -> bool:
        """Whether a text can be a name; where it cannot, that is told."""
        if _NAME.fullmatch(name):
            return True
        self._wrong(path, f"{name[:80]!r} is no name: letters, digits and . _ : - within, at most 127")
        return False

    def listed(self, patterns: str | list[str], path: str) -> list[str]:
        """The names of one pattern or several."""
        each = [patterns] if isinstance(patterns, str) else patterns
        return [name for pattern in each for name in self.expanded(pattern, path, {})]

    def filled_in(self, text: str, path: str, place: Place) -> str:
        """A text with $rack, $row, $suite and $site put in."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in place:
                told = ", ".join(f"${each}" for each in place) or "none here"
                self._wrong(path, f"${name} has no value; known: {told}")
            return place.get(name, name)

        return _VARIABLE.sub(value, text)

    def claimed(self, name: str, path: str) -> bool:
        """Take a name for one thing; False where another has it, which is told."""
        if name in self.paths:
            self._wrong(path, f"the name {name} is taken already, by {self.paths[name]}; names are unique over all")
            return False
        self.paths[name] = path
        return True

    def count(self, things: int, path: str) -> None:
        """Count what a file makes: names, GPUs, cables. Raises TooMany, which is told."""
        self._made += things
        if self._made > MOST_THINGS:
            self._wrong(path, f"makes more than {MOST_THINGS:,} things; that is rather a slip than a facility")
            raise TooMany
