"""Capacity from the envelope down: what fits, and what keeps the next one out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.common.errors import InvalidRequest
from stoker.planner.core.envelope import Capacity, candidates, capacity, in_words, instead
from stoker.planner.core.facility.values import (
    Envelope,
    Facility,
    Feed,
    Link,
    Node,
    NodeType,
    Rack,
    RackType,
    Site,
    Switch,
)
from stoker.planner.core.limits import Kind, Limit, Scope
from stoker.planner.core.units import link_rate, watts

HGX = NodeType("hgx", 4, 60.0, watts(5), watts(1), "h100", 8, 8, cost_per_hour=20.0)
DGX = NodeType("dgx-h100", 8, 130.0, watts(10.2), watts(3), "h100", 8, 8)
TRAY = NodeType("gb200-tray", 1, 30.0, watts(6), watts(2), "gb200", 4, 4)
STORE = NodeType("store", 2, 40.0, watts(1), watts(1))
NVL72 = RackType("nvl72", 48, reserved_u=10, base_power=watts(12), nodes={"gb200-tray": 18})
TYPES = {kind.name: kind for kind in (HGX, DGX, TRAY, STORE)}
A_AND_B = (Feed("a", "A", watts(15)), Feed("b", "B", watts(15)))


def facility(site: Site, *envelopes: Envelope, feeds: tuple[Feed, ...] = ()) -> Facility:
    return Facility(
        "f",
        node_types=TYPES,
        rack_types={NVL72.name: NVL72},
        sites={site.name: site},
        feeds={feed.name: feed for feed in feeds},
        envelopes=envelopes,
    )


def one_rack(rack: Rack | None = None, feeds: tuple[Feed, ...] = A_AND_B) -> Facility:
    return facility(Site("s"), Envelope(rack or Rack("r", "s", fill="hgx"), feeds, racks=1))


def listed(
    *racks: Rack, nodes: tuple[Node, ...] = (), feeds: tuple[Feed, ...] = (), site: Site | None = None
) -> Facility:
    site = site or Site("s")
    return replace(
        facility(site, feeds=feeds),
        racks={rack.name: rack for rack in racks},
        nodes={node.name: node for node in nodes},
    )


def bound(found: Capacity) -> Limit:
    assert found.binding is not None
    return found.binding


def test_a_rack_of_15_kw_takes_three_nodes_of_5_kw() -> None:
    found = capacity(one_rack())
    assert (found.nodes_per_rack, found.u_used, found.gpus, found.power) == (3, 12, 24, 15_000)
    assert bound(found).kind is Kind.POWER
    left = {limit.kind: (limit.left, limit.allows) for limit in found.limits}
    assert left[Kind.SPACE] == (30, 7)
    assert left[Kind.POWER] == (0, 0)


def test_the_same_rack_takes_one_dgx_and_says_why() -> None:
    found = capacity(one_rack(), "dgx-h100")
    assert (found.nodes_per_rack, found.u_used) == (1, 8)
    said = in_words(bound(found), found.fill)
    assert said == "with one more dgx-h100, rack r-1 needs 20.4 kW of power and has 15 kW after the loss of B"


@pytest.mark.parametrize(("reserved", "racks", "kilowatts", "gpus"), [(0, 16, 1_920, 1_152), (200, 15, 1_800, 1_080)])
def test_two_megawatts_of_racks_that_come_whole(reserved: float, racks: int, kilowatts: int, gpus: int) -> None:
    site = Site("hall", supply=watts(2_000), reserved=watts(reserved))
    whole = Rack("r", "hall", height_u=48, reserved_u=10, base_power=watts(12), type="nvl72")
    found = capacity(facility(site, Envelope(whole)))
    assert (found.racks, found.power, found.gpus) == (racks, watts(kilowatts), gpus)
    assert (bound(found).kind, bound(found).scope, bound(found).at) == (Kind.POWER, Scope.SITE, "hall")
    assert found.gpus_per_rack == 72
    domains = {gpu.scale_up for node in found.facility.nodes.values() for gpu in node.gpus}
    assert domains == set(found.facility.racks), "one NVLink domain a rack"


def test_without_surviving_a_loss_both_feeds_count() -> None:
    found = capacity(one_rack(Rack("r", "s", fill="hgx", survives_loss=False)))
    assert found.nodes_per_rack == 6


def test_the_weaker_feed_decides_after_a_loss() -> None:
    found = capacity(one_rack(feeds=(Feed("a", "A", watts(40)), Feed("b", "B", watts(10)))))
    assert found.nodes_per_rack == 2


def test_a_rack_with_one_source_goes_dark_with_it_and_may_use_all_of_it() -> None:
    found = capacity(one_rack(feeds=(Feed("a", "A", watts(40)),)))
    assert found.nodes == 8


def test_what_a_feed_carries_for_racks_that_a_loss_does_not_touch_counts_after_it() -> None:
    ups = Feed("ups-b", "B", watts(33))
    feeds = (Feed("a", "A", watts(40)), ups, Feed("b1", "B", None, ups.name), Feed("b2", "B", None, ups.name))
    nodes = tuple(Node(f"n{number}", "r2", "hgx") for number in range(4))
    both = Rack("r1", "s", feeds=("a", "b1"), fill="hgx")
    found = capacity(listed(both, Rack("r2", "s", feeds=("b2",)), nodes=nodes, feeds=feeds))
    assert found.added == 2, "20 kW of the other rack and, after the loss of A, all of this one's are on ups-b"
    assert (bound(found).at, bound(found).lost) == ("ups-b", "A")


@pytest.mark.parametrize(
    ("rack", "kind", "nodes"),
    [
        (Rack("r", "s", fill="hgx", height_u=11), Kind.SPACE, 2),
        (Rack("r", "s", fill="hgx", reserved_u=34), Kind.SPACE, 2),
        (Rack("r", "s", fill="hgx", weight_kg=100.0), Kind.WEIGHT, 1),
        (Rack("r", "s", fill="hgx", cooling=watts(11)), Kind.COOLING, 2),
        (Rack("r", "s", fill="hgx", base_power=watts(0.001)), Kind.POWER, 2),
    ],
)
def test_whatever_runs_out_first_binds(rack: Rack, kind: Kind, nodes: int) -> None:
    found = capacity(one_rack(rack))
    assert (found.nodes_per_rack, bound(found).kind) == (nodes, kind)


def test_ports_of_the_fabric_bind() -> None:
    found = capacity(facility(Site("s", fabric_ports=35), Envelope(Rack("r", "s", fill="hgx"), A_AND_B)))
    assert (found.nodes, found.racks) == (4, 2)
    assert (bound(found).kind, bound(found).used) == (Kind.PORTS, 32)


def test_free_ports_are_counted_on_leaf_switches() -> None:
    rate = link_rate(400)
    start = listed(Rack("r", "s"), nodes=(Node("n1", "r", "hgx"),))
    found = capacity(
        replace(
            start,
            switches={"leaf": Switch("leaf", 0, 32), "spine": Switch("spine", 1, 64)},
            links=(Link("n1", "leaf", rate, 8), Link("leaf", "spine", rate, 8)),
        )
    )
    assert (found.nodes, found.added) == (3, 2)
    assert (bound(found).kind, bound(found).available) == (Kind.PORTS, 24)


def test_feeds_above_racks_bind_after_a_loss() -> None:
    above = (Feed("ups-a", "A", watts(33)), Feed("ups-b", "B", watts(33)))
    lowest = (Feed("a", "A", watts(15), "ups-a"), Feed("b", "B", watts(15), "ups-b"))
    found = capacity(facility(Site("s"), Envelope(Rack("r", "s", fill="hgx"), lowest), feeds=above))
    assert (found.nodes, found.racks) == (6, 2)
    assert (bound(found).scope, bound(found).at) == (Scope.FEED, "ups-a")
    assert "ups-a needs 35 kW of power and has 33 kW after the loss of B" in in_words(bound(found), "hgx")


def test_nodes_that_stand_count_and_keep_their_units() -> None:
    nodes = (Node("n1", "r", "hgx", bottom_u=5), Node("n2", "r", "store"))
    found = capacity(listed(Rack("r", "s", height_u=16, fill="hgx"), nodes=nodes))
    assert {name: node.bottom_u for name, node in found.facility.nodes.items()} == {
        "n1": 5,
        "n2": 0,
        "r-n3": 9,
        "r-n4": 13,
    }, "units 3 and 4 are free, and too low for it"
    assert bound(found).kind is Kind.SPACE


def test_a_rack_that_is_too_full_takes_nothing_and_says_so() -> None:
    feeds = (Feed("a", "A", watts(8)), Feed("b", "B", watts(8)))
    nodes = (Node("n1", "r", "hgx"), Node("n2", "r", "hgx"))
    found = capacity(listed(Rack("r", "s", feeds=("a", "b")), nodes=nodes, feeds=feeds))
    assert found.added == 0
    assert bound(found).left == -2_000


def test_only_racks_that_are_meant_for_more_get_more() -> None:
    found = capacity(listed(Rack("r1", "s", height_u=8), Rack("r2", "s", height_u=8, fill="hgx")))
    assert {node.rack for node in found.facility.nodes.values()} == {"r2"}


def test_what_if_they_were_filled_with_another_type() -> None:
    whole = Rack("r", "s", height_u=48, base_power=watts(12), type="nvl72")
    given = facility(Site("s", supply=watts(100)), Envelope(whole))
    assert candidates(given) == ("dgx-h100", "hgx", "nvl72")
    assert capacity(given, "dgx-h100").nodes == 9, "the switches of the racks that it replaces draw nothing"
    assert capacity(given, "nvl72").nodes == 0


def test_the_facility_that_comes_out_holds_no_more() -> None:
    once = capacity(one_rack())
    again = capacity(once.facility)
    assert (again.nodes, again.added, again.power) == (once.nodes, 0, once.power)


def test_no_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing ends it: say how many racks"):
        capacity(facility(Site("s"), Envelope(Rack("r", "s", fill="hgx"), A_AND_B)))


def test_absurd_numbers_are_refused() -> None:
    tall = Rack("r", "s", fill="hgx", height_u=10**6)
    with pytest.raises(InvalidRequest, match="more than 100,000 nodes"):
        capacity(facility(Site("s", supply=watts(1e6)), Envelope(tall)))


def test_cost_is_of_nodes_and_energy_and_unknown_is_not_zero() -> None:
    assert capacity(one_rack(), "dgx-h100").cost_per_hour is None
    priced = replace(one_rack(), sites={"s": Site("s", cost_per_kwh=0.2, cost_factor=2.0)})
    assert capacity(priced).cost_per_hour == pytest.approx(3 * 20 * 2 + 15 * 0.2)


def test_tokens_per_joule_needs_a_rate_of_each_type() -> None:
    found = capacity(one_rack())
    assert found.tokens_per_joule({"h100": 1_000.0}) == pytest.approx(24 * 1_000 / 15_000)
    assert found.tokens_per_joule({"b200": 1_000.0}) is None


def test_instead_of_what_stands_there() -> None:
    rate = link_rate(400)
    nodes = (Node("n1", "r1", "hgx"), Node("s1", "r1", "store"), Node("s2", "r2", "store"))
    given = replace(listed(Rack("r1", "s"), Rack("r2", "s"), nodes=nodes), links=(Link("n1", "leaf", rate),))
    given = replace(given, switches={"leaf": Switch("leaf", 0, 64)})
    found = capacity(instead(given), "dgx-h100")
    assert (found.racks, found.nodes_per_rack, found.gpus) == (2, 6, 40), "stores stay, and r2 was not for GPUs"


def test_a_price_that_is_missing_is_not_zero() -> None:
    site = Site("s", cost_per_kwh=0.2)
    found = capacity(facility(site, Envelope(Rack("r", "s", fill="dgx-h100"), A_AND_B, 1)))
    assert found.cost_per_hour is None
    assert found.energy_per_hour == pytest.approx(10.2 * 0.2)
