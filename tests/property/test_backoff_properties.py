"""Back-off: doubling, capped, and never in step."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.common.backoff import Backoff


class Fixed(Random):
    """A generator that draws one number."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self._drawn = drawn

    def random(self) -> float:
        return self._drawn


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 2.0)
    assert [backoff.delay_s(n, Fixed(1.0)) for n in range(7)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert backoff.delay_s(3, Fixed(0.0)) == pytest.approx(0.4)
    assert backoff.delay_s(10_000, Fixed(0.5)) <= 2.0


@given(st.integers(0, 2_000), st.floats(0, 1, exclude_max=True), st.floats(0.01, 1), st.floats(1, 60))
def test_a_delay_stays_in_its_band(attempt: int, drawn: float, first_s: float, max_s: float) -> None:
    backoff, rng = Backoff(first_s, max_s), Fixed(drawn)
    wait = backoff.delay_s(attempt, rng)
    assert first_s / 2 <= wait <= max_s
    assert wait <= backoff.delay_s(attempt + 1, rng)
