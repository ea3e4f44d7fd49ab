"""How tests wait is tested too: a wait that never fails would hide every fault."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.waiting import eventually, eventually_blocking, forever


@pytest.mark.looptime
async def test_the_first_true_value_is_returned() -> None:
    started = asyncio.get_running_loop().time()
    values = iter([0, "", None, "seven", "eight"])
    assert await eventually(lambda: next(values), "a value") == "seven"

    async def third() -> float | None:
        now = asyncio.get_running_loop().time()
        return now if now > started + 3 else None

    assert await eventually(third, "3 s") > started + 3


@pytest.mark.looptime
async def test_what_does_not_come_is_named_with_what_was_last_seen() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(AssertionError, match=r"not within 2 s: the fire burns; last seen 0"):
        await eventually(lambda: 0, "the fire burns", 2)
    assert 2 <= asyncio.get_running_loop().time() - started < 2.1
    with pytest.raises(AssertionError, match=r"len\(\[\]\) == 1"):
        await eventually(lambda: len([]) == 1, within_s=0.1)


@pytest.mark.looptime
async def test_a_condition_that_hangs_ends_at_the_deadline() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(AssertionError, match="not within 2 s: an answer; last seen 'nothing'"):
        await eventually(forever, "an answer", 2)
    assert asyncio.get_running_loop().time() - started == pytest.approx(2)


@pytest.mark.looptime
@pytest.mark.parametrize("error", [TimeoutError("too slow"), OSError("refused")])
async def test_only_the_errors_named_mean_not_yet(error: Exception) -> None:
    def fails() -> bool:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await eventually(fails, "an answer", 2)
    with pytest.raises(AssertionError, match=f"an answer; last seen {type(error).__name__}"):
        await eventually(fails, "an answer", 2, not_yet=(OSError,))


def test_without_a_loop() -> None:
    values = iter([0, 7])
    assert eventually_blocking(lambda: next(values), "a value") == 7
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: the fire burns; last seen 0"):
        eventually_blocking(lambda: 0, "the fire burns", 0.05)
