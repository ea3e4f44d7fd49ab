"""Whatever is lost, late or begun anew: samples are never negative, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from stoker.scaler.core.counting import Meter, Reading
from stoker.scaler.core.memory import Memory
from stoker.scaler.core.minutes import MINUTE_S
from stoker.scaler.core.observing import Asked, Observer, Report
from stoker.scaler.core.policy import Policy
from stoker.scaler.core.signals import Minute, Sample
from stoker.scaler.core.values import Replica, Standing
from stoker.scaler.persisted import packed_minutes, unpacked_minutes

# Of each second: requests that come, whether the report of it arrives, whether the source begins anew before it.
SECONDS = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 9).map(lambda n: n == 0)), max_size=60)


@given(SECONDS, st.integers(1, 4))
def test_a_meter_counts_each_thing_at_most_once(seconds: list[tuple[int, bool, bool]], every: int) -> None:
    meter, life, count, came, told = Meter(), 1, 0, 0, 0.0
    for second, (more, arrives, anew) in enumerate(seconds):
        if anew:
            life, count = life + 1, 0
        count, came = count + more, came + more
        if arrives:
            meter.read(Reading(float(second), life, {"a": float(count)}))
        if second % every == 0 and (grown := meter.grown()) is not None:
            assert grown.counts["a"] >= 0
            assert grown.seconds > 0
            told += grown.counts["a"]
    assert told <= came


@given(st.lists(st.integers(0, 50), min_size=3, max_size=60), st.data())
def test_a_meter_of_one_life_misses_nothing_between_its_first_and_last_reading(
    seconds: list[int], data: st.DataObject
) -> None:
    arrives = [True, *data.draw(st.lists(st.booleans(), min_size=len(seconds) - 2, max_size=len(seconds) - 2)), True]
    meter, count, told = Meter(), 0, 0.0
    for second, more in enumerate(seconds):
        count += more
        if arrives[second]:
            meter.read(Reading(float(second), 1, {"a": float(count)}))
        if grown := meter.grown():
            told += grown.counts["a"]
    assert told == sum(seconds[1:])


@given(
    st.dictionaries(st.sampled_from(["r1", "r2"]), SECONDS, max_size=2),
    st.dictionaries(st.sampled_from(["chat-0", "chat-1"]), SECONDS, max_size=2),
)
def test_no_figure_is_ever_negative_and_shares_are_shares(
    routers: dict[str, list[tuple[int, bool, bool]]], engines: dict[str, list[tuple[int, bool, bool]]]
) -> None:
    observer, memory = Observer(), Memory()
    replicas = [Replica(name, "chat", Standing.READY) for name in engines]
    counts, lives = dict.fromkeys([*routers, *engines], 0), dict.fromkeys([*routers, *engines], 1)
    for second in range(60):
        for name, seconds in {**routers, **engines}.items():
            more, arrives, anew = seconds[second] if second < len(seconds) else (0, False, False)
            if anew:
                counts[name], lives[name] = 0, lives[name] + 1
            counts[name] += more
            count = counts[name]
            if arrives and name in routers:
                counted = {"arrivals": count, "prompt_tokens": 9 * count, "judged": count, "within_slo": count // 2}
                observer.demand(name, lives[name], [Asked("m", ("chat",), counted, queued=more)], float(second))
            elif arrives:
                counted = {"generation_tokens": count, "looked_up": 2 * count, "found": count}
                observer.load(name, Report(lives[name], counted, running=more), float(second))
        if second % 2:
            sample = observer.samples(["chat"], replicas, float(second))["chat"].sample
            memory.add(sample, Policy(), 1e9 + second)
            for field in fields(Sample):
                value = getattr(sample, field.name)
                assert value is None or value >= 0, field.name
            for share in (sample.hit_rate, sample.within_slo):
                assert share is None or share <= 1
    assert all(minute.arrivals_per_s <= 100 for minute in memory.minutes.kept)


@given(
    st.lists(
        st.builds(
            Minute,
            st.integers(0, 9_000).map(lambda n: MINUTE_S * n),
            *[st.floats(0, 1e9, allow_subnormal=False)] * 3,
            st.floats(0, 1),
        ),
        max_size=50,
        unique_by=lambda minute: minute.at,
    )
)
def test_minutes_come_back_within_four_thousandths(minutes: list[Minute]) -> None:
    minutes.sort(key=lambda minute: minute.at)
    back = unpacked_minutes(*packed_minutes(minutes))
    assert [minute.at for minute in back] == [m.at for m in minutes if m.at > minutes[-1].at - 7_200 * MINUTE_S]
    for minute in back:
        (before,) = [m for m in minutes if m.at == minute.at]
        for field in fields(Minute):
            ours, theirs = getattr(before, field.name), getattr(minute, field.name)
            assert abs(theirs - ours) <= 0.004 * ours + 1e-30
