"""The wall clock without its jumps."""

from __future__ import annotations

_JUMP_S = 2.0
_BELIEVED_AFTER_S = 60.0


class SteadyClock:
    """Wall-clock seconds that go on by the monotonic clock.

    A step of the wall clock is believed once it has stood for a minute: what is set wrong and corrected at once
    moves nothing. Slow corrections are followed.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._jumped: tuple[float, float] | None = None
        """To which offset, and since when (monotonic seconds)."""

    def at(self, now: float, wall: float) -> float:
        """The time of day at `now` (monotonic seconds), at which the wall clock says `wall`."""
        offset = wall - now
        if self._offset is None or abs(offset - self._offset) <= _JUMP_S:
            self._offset, self._jumped = offset, None
        elif self._jumped is None or abs(offset - self._jumped[0]) > _JUMP_S:
            self._jumped = offset, now
        elif now - self._jumped[1] >= _BELIEVED_AFTER_S:
            self._offset, self._jumped = offset, None
        return now + self._offset
