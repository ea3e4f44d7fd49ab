"""The minutes of deployments that share a demand."""

from __future__ import annotations

from stoker.scaler.core import demand
from stoker.scaler.core.reserve import reserve
from stoker.scaler.core.signals import History, Minute


class Load:
    """Counts how often it is asked."""

    asked = 0

    def __call__(self, minute: Minute) -> float:
        self.asked += 1
        return minute.arrivals_per_s


def test_what_was_found_of_a_shared_past_is_remembered_until_a_minute_ends() -> None:
    past = tuple(Minute(60.0 * n, 1.0, 1.0, 1.0, 0.0) for n in range(100))
    histories = {"a": History(minutes=past), "b": History(minutes=tuple(past))}
    load, weights = Load(), {"a": 1.0, "b": 1.0}

    def ask() -> int:
        before = load.asked
        minutes = demand.shared(histories, weights)["a"].minutes
        assert minutes[-1].arrivals_per_s == 2.0
        reserve(minutes, load, 90.0, settle_s=300.0, season_s=86_400.0, allowed=0.025, prior=1.0)
        return load.asked - before

    assert ask() == 100
    assert ask() == 0
    histories["b"] = History(minutes=(*past, Minute(6_000.0, 1.0, 1.0, 1.0, 0.0)))
    assert ask() == 100
    histories["a"] = History(minutes=list(past))
    assert [ask(), ask()] == [100, 100], "a list may change"
