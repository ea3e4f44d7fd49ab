"""How tests wait: until a condition holds, with a deadline. Never for a time to pass."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, NoReturn

_FIRST_S, _LAST_S = 0.02, 0.1
_SHARE = 0.02


def _pause(waited_s: float) -> float:
    """Seconds until the next look: a fiftieth of the wait so far, for looks take time from what is waited for."""
    return min(_LAST_S, max(_FIRST_S, _SHARE * waited_s))


async def eventually(
    condition: Callable[[], object],
    what: str = "",
    within_s: float = 60.0,
    *,
    not_yet: tuple[type[Exception], ...] = (),
) -> Any:
    """The first true value of `condition`, a function or a coroutine function.

    Raises `AssertionError` naming `what` (without it: the condition's own source) and what was last seen after
    `within_s` seconds, in the middle of a condition if need be. Errors of the kinds in `not_yet` mean that it
    does not hold yet; others pass through.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + within_s
    seen: object = "nothing"
    expected: tuple[type[Exception], ...] = (TimeoutError, *not_yet)
    while True:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                held = condition()
                seen = await held if inspect.isawaitable(held) else held
            if seen:
                return seen
        except expected as error:
            if limit.expired():
                raise _late(what or _source(condition), within_s, seen) from None
            if not isinstance(error, not_yet):
                raise
            seen = error
        if loop.time() >= deadline:
            raise _late(what or _source(condition), within_s, seen)
        await asyncio.sleep(_pause(loop.time() - began))


def eventually_blocking(condition: Callable[[], object], what: str, within_s: float = 60.0) -> Any:
    """`eventually` for code outside an event loop; the condition bounds its own duration."""
    began = time.monotonic()
    deadline = began + within_s
    while not (seen := condition()):
        if time.monotonic() >= deadline:
            raise _late(what, within_s, seen)
        time.sleep(_pause(time.monotonic() - began))
    return seen


async def forever() -> NoReturn:
    """Stand for a peer that never answers: ends by cancellation only."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


def _source(condition: Callable[[], object]) -> str:
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)


def _late(what: str, within_s: float, seen: object) -> AssertionError:
    return AssertionError(f"not within {within_s:g} s: {what}; last seen {seen!r}")
