"""Who goes in a simulation, and what becomes of what they held: the scaler's own choice, retiring as in the fleet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from stoker.bench.replicas import Clock, Hardware, Job
from stoker.bench.sites import RouterSite
from stoker.bench.traces import numbered_key
from stoker.router.core import RoutingConfig
from stoker.scaler.core.warming import Warming
from stoker.simulate.figures import Run
from stoker.simulate.fleet import SimulatedFleet
from stoker.simulate.loads import Liveliness, tenants
from stoker.simulate.policies import parsed
from stoker.simulate.run import simulate
from stoker.simulate.settings import Settings, Starting, Victims

SETTINGS = Settings(starting=Starting(30.0), initial=6, most=10, hardware=Hardware(kv_blocks=900, batching=True))
BLOCK = SETTINGS.hardware.block_size
TENANTS = partial(tenants, 3, shape=Liveliness(tenants=40, over=0.6, turn_s=400.0, seconds=1_000.0))
SAMPLED = [key for key in map(numbered_key, range(1, 2_000)) if key % 16 == 0]
OTHERS = [key for key in map(numbered_key, range(1, 2_000)) if key % 16]


def after(victims: Victims) -> Run:
    policy = "concurrency:target=1.2,stable_s=60,pace.settle_s=60"
    settings = replace(SETTINGS, victims=victims)
    return simulate(TENANTS, parsed(policy, settings.objective), settings)


def test_whose_caches_are_worth_least_go_and_hits_show_it() -> None:
    warm, newest, lot = after(Victims.WARM), after(Victims.NEWEST), after(Victims.RANDOM)
    assert warm == after(Victims.WARM), "the same each time"
    hits = []
    for each in (warm, newest, lot):
        assert each.figures.refused == 0
        assert each.figures.requests == len(list(TENANTS()))
        assert each.figures.scale_downs >= 3
        hits.append(each.figures.hit_rate_after or 0.0)
    assert hits[0] > 1.02 * max(hits[1:]), hits
    assert (newest.figures.warmed_tokens, lot.figures.warmed_tokens) == (0, 0)
    assert warm.figures.warmed_tokens > 0
    shrunk = next(change for change in warm.changes if change.after < change.before)
    assert len(shrunk.costs) == shrunk.before - shrunk.after
    assert any(cost.lost_tokens > 0 for change in warm.changes for cost in change.costs.values())


class Desk:
    """A fleet of two in which the second holds a prompt."""

    def __init__(self, retire_s: float = 30.0) -> None:
        self.clock = Clock()
        self.site = RouterSite(RoutingConfig(), "stoker", 1)
        self.settings = replace(SETTINGS, initial=2, retire_s=retire_s)
        self.fleet = SimulatedFleet(self.settings, self.site, self.clock)
        self.first, self.second = (replica.id for replica in self.fleet.replicas)

    def ask(self, replica: str, keys: tuple[int, ...]) -> None:
        """A request as a router would send it there."""
        job = Job(self.clock.now, keys, len(keys) * BLOCK, 1)
        self.fleet.sent(replica, job)

        def ended(end: bool) -> None:
            if end:
                self.fleet.ended(replica)

        self.fleet.engines[replica].submit(job, ended, self.clock.now)
        self.clock.run_for(20.0)

    def leave(self, *leaves: int, tokens: float = 100.0 * BLOCK) -> None:
        plans = [Warming(leaf, self.second, self.first, tokens, tokens) for leaf in leaves]
        self.fleet.remove([self.second], plans)


# Two blocks that nobody follows, one that the scaler does, two more that stand behind it, and the next that it does.
PROMPT = (*OTHERS[:2], SAMPLED[0], *OTHERS[2:4], SAMPLED[1], OTHERS[4])


def test_what_it_held_is_computed_before_it_drains() -> None:
    desk = Desk()
    desk.ask(desk.second, PROMPT)
    desk.leave(SAMPLED[0])
    assert desk.site.fleet.retiring == {desk.second}
    desk.clock.run_for(5.0)
    assert [replica.id for replica in desk.fleet.replicas] == [desk.first], "retired, drained, gone"
    assert desk.fleet.engines[desk.first].cache.hit(PROMPT) == 5, "up to the next block that is followed"
    assert desk.fleet.measured.warmed_blocks == 5


def test_a_successor_that_has_enough_to_do_is_asked_later_and_no_longer_than_the_time_allows() -> None:
    desk = Desk(retire_s=3.0)
    desk.ask(desk.second, PROMPT)
    for number in range(40):
        desk.fleet.engines[desk.first].submit(Job(0.0, (OTHERS[50 + number],), 40_000, 1), lambda end: None, 0.0)
    assert desk.fleet.engines[desk.first].waiting or desk.fleet.engines[desk.first].running
    desk.leave(SAMPLED[0])
    desk.clock.run_for(2.5)
    assert len(desk.fleet.replicas) == 2
    desk.clock.run_for(1.0)
    assert [replica.id for replica in desk.fleet.replicas] == [desk.first]


@pytest.mark.parametrize("wanting", ["unknown", "evicted", "unfunded"])
def test_what_cannot_be_computed_keeps_nobody(wanting: str) -> None:
    desk = Desk()
    if wanting != "unknown":
        desk.ask(desk.second, PROMPT)
    if wanting == "evicted":
        desk.fleet.engines[desk.second].cache.take(tuple(OTHERS[100:900] + SAMPLED[5:105]))
    desk.leave(SAMPLED[0], SAMPLED[1], tokens=BLOCK / 20)
    desk.clock.run_for(5.0)
    assert [replica.id for replica in desk.fleet.replicas] == [desk.first]
    assert desk.fleet.measured.warmed_blocks == (5 if wanting == "unfunded" else 0)


def test_who_retires_is_called_back_before_another_is_assigned() -> None:
    desk = Desk()
    desk.ask(desk.second, PROMPT)
    desk.leave(SAMPLED[0])
    desk.fleet.add(2)
    standing = {replica.id: replica.leaving for replica in desk.fleet.replicas}
    assert standing == {desk.first: False, desk.second: False, "model-3": False}
    assert desk.site.fleet.retiring == frozenset()
    desk.clock.run_for(100.0)
    assert len(desk.fleet.engines) == 3, "it goes on"
