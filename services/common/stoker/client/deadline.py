"""When a request must have ended."""

from __future__ import annotations

import asyncio

from stoker.common.errors import DeadlineExceeded


class Deadline:
    """So many seconds from now, by the clock of the running loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = asyncio.get_running_loop().time() + seconds

    def left(self) -> float:
        """Seconds. Raises DeadlineExceeded when there are none."""
        left = self.at - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded(f"the request did not begin within {self.seconds:g} s; allow more (timeout_s)")
        return left
