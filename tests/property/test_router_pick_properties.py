"""Whatever callers tell, in whatever order: what is held is what is open, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.errors import Exhausted, Unavailable
from stoker.router.picking.picks import Event
from tests.support.picking import SILENCE_S, UNHEARD_S, World

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.integers(1, 400)),
        st.tuples(st.sampled_from(Event), st.integers(0, 3), st.integers(-1, 3), st.booleans()),
        st.tuples(st.just(Event.MOVED), st.integers(0, 1), st.integers(1, 2), st.booleans()),
        st.tuples(st.just("pass"), st.floats(0.0, 20.0)),
        st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 10_000)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_way_of_telling_leaks_a_count(steps: list[tuple[object, ...]]) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[object, ...]]) -> None:
    world = World()
    names: list[str] = []
    for number, step in enumerate(steps):
        match step:
            case ("pick", int(tokens)):
                with contextlib.suppress(Exhausted, Unavailable):  # held, or nobody there
                    names.append((await world.pick(tokens, first=10_000 * number, wait_s=0.0)).pick_id)
            case (Event() as event, int(which), int(place), bool(fault)):
                name = names[which] if which < len(names) else "unknown"
                world.picks.tell(name, event, place, fault=fault)
            case ("pass", float(seconds)):
                world.now += seconds
                world.picks.sweep()
            case ("report", int(which), int(tokens)):
                world.fleet.load.report(f"tiny-{which}", tokens, seen_at=world.now)
            case ("leave", int(which)):
                target = world.view.targets[f"tiny-{which}"]
                target.reachable = not target.reachable
                world.view.pools["tiny"].announce(target)
        held = sum(target.in_flight for target in world.view.targets.values())
        assert held == world.router.in_flight == world.fleet.load.in_flight == len(world.picks)
        assert all(world.fleet.load.own(name) >= -1e-6 for name in world.view.targets)
    world.now += max(UNHEARD_S, SILENCE_S) + 0.1
    world.picks.sweep()
    assert world.idle()
    assert all(abs(world.fleet.load.own(name)) < 1e-6 for name in world.view.targets)
