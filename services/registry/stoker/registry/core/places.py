"""Which of several registries to try next, in an order of preference of one's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Places:
    """Places 0 to `count` - 1, of which 0 is home: the one preferred."""

    count: int
    at: int = 0
    """Where to be, or to try, now."""
    _tried: int = 0

    def lost(self, *, served: bool) -> int:
        """The place served and is lost, or did not serve: go to the next, from elsewhere to home first.

        Returns how many rounds over all places were in vain where one has just ended, and a pause is due; else 0.
        """
        if served:
            self.at, self._tried = (0 if self.at else 1), 1
        else:
            self.at, self._tried = self.at + 1, self._tried + 1
        self.at %= self.count
        rounds, rest = divmod(self._tried, self.count)
        return 0 if rest else rounds

    def go_home(self) -> None:
        """Home serves again."""
        self.at = self._tried = 0
