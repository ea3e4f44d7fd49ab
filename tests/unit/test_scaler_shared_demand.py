"""The minutes of deployments that share a demand."""

from __future__ import annotations

from stoker.scaler.core import demand
from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.reserve import reserve
from stoker.scaler.core.signals import History, Minute


class Load:
    """Counts the minutes of which it is asked."""

    asked = 0

    def __call__(self, past: Past) -> Series:
        self.asked += len(past)
        return past.arrivals_per_s


def test_what_was_found_of_a_shared_past_is_remembered_until_a_minute_ends() -> None:
    past = [Minute(60.0 * n, 1.0, 1.0, 1.0, 0.0) for n in range(100)]
    histories = {"a": History(minutes=Past.of(past)), "b": History(minutes=Past.of(past))}
    load, weights = Load(), {"a": 1.0, "b": 1.0}

    def ask() -> int:
        before = load.asked
        minutes = demand.shared(histories, weights)["a"].minutes
        assert minutes[-1].arrivals_per_s == 2.0
        reserve(minutes, load, 90.0, settle_s=300.0, season_s=86_400.0, allowed=0.025, prior=1.0)
        return load.asked - before

    assert ask() == 100
    assert ask() == 0
    histories["b"] = History(minutes=Past.of([*past, Minute(6_000.0, 1.0, 1.0, 1.0, 0.0)]))
    assert ask() == 100
    histories["a"] = History(minutes=past)
    assert [ask(), ask()] == [100, 100], "a list may change"
