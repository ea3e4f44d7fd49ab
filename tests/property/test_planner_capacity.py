"""Whatever a facility is like: what is said to fit does, and not one more does. Limits are counted here anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planner.core.envelope import capacity
from stoker.planner.core.facility.values import Envelope, Facility, Feed, Node, NodeType, Rack, Site
from stoker.planner.core.units import Watts

KINDS = (
    NodeType("small", 2, 30.0, Watts(3_000), Watts(500), "g", 2, 1),
    NodeType("large", 8, 130.0, Watts(10_200), Watts(3_000), "g", 8, 8),
)
TYPES = {kind.name: kind for kind in KINDS}


@st.composite
def facilities(draw: st.DrawFn) -> Facility:
    """Racks with one to three feeds under two sources, some with nodes, some to be filled."""
    feeds = {
        side: Feed(side, side, draw(st.one_of(st.none(), st.integers(5_000, 60_000).map(Watts)))) for side in "AB"
    }
    racks: dict[str, Rack] = {}
    nodes: dict[str, Node] = {}
    for number in range(draw(st.integers(1, 4))):
        name = f"r{number}"
        lowest = []
        for at, side in enumerate(draw(st.lists(st.sampled_from("AB"), min_size=0, max_size=3))):
            feed = Feed(f"{name}-{at}", side, draw(st.sampled_from([None, None, Watts(15_000)])), side)
            feeds[feed.name] = feed
            lowest.append(feed.name)
        racks[name] = Rack(
            name,
            "s",
            height_u=draw(st.integers(1, 48)),
            reserved_u=draw(st.integers(0, 4)),
            weight_kg=draw(st.sampled_from([None, None, 100.0, 500.0])),
            cooling=draw(st.sampled_from([None, None, Watts(12_000)])),
            feeds=tuple(lowest),
            survives_loss=draw(st.booleans()),
            fill=draw(st.sampled_from(["", "small", "large"])),
            base_power=draw(st.sampled_from([Watts(0), Watts(500)])),
        )
        if draw(st.booleans()):
            nodes[f"n{number}"] = Node(f"n{number}", name, "small", bottom_u=draw(st.integers(0, 2)))
    site = Site("s", supply=draw(st.one_of(st.none(), st.integers(0, 200_000).map(Watts))), reserved=Watts(1_000))
    site = replace(site, fabric_ports=draw(st.one_of(st.none(), st.integers(0, 60))))
    return Facility("f", node_types=TYPES, sites={"s": site}, feeds=feeds, racks=racks, nodes=nodes)


def broken(facility: Facility) -> set[str]:
    """The limits that a facility does not keep, all nodes at their most."""
    return {name for name, used, has in _loads(facility) if has is not None and used > has + 1e-6}


def _loads(facility: Facility) -> Iterator[tuple[str, float, float | None]]:
    site = facility.sites["s"]
    power = {name: float(rack.base_power) for name, rack in facility.racks.items()}
    for name, rack in facility.racks.items():
        kinds = [TYPES[node.type] for node in facility.nodes.values() if node.rack == name]
        power[name] += sum(kind.max_power for kind in kinds)
        yield f"{name} cooling", power[name], rack.cooling
        yield f"{name} weight", sum(kind.weight_kg for kind in kinds), rack.weight_kg
        yield f"{name} space", sum(kind.height_u for kind in kinds), max(0, rack.height_u - rack.reserved_u)
    yield "site", sum(power.values()), None if site.supply is None else site.supply - site.reserved
    yield "ports", sum(TYPES[node.type].fabric_ports for node in facility.nodes.values()), site.fabric_ports
    for lost in ("", "A", "B"):
        loads = dict.fromkeys(facility.feeds, 0.0)
        for name, rack in facility.racks.items():
            alive = [feed for feed in rack.feeds if facility.feeds[feed].source != lost]
            if len(alive) < len(rack.feeds) and not rack.survives_loss:
                continue
            for feed in alive:
                loads[feed] += power[name] / len(alive)
                loads[facility.feeds[feed].parent] += power[name] / len(alive)
        for feed, load in loads.items():
            yield f"{feed} without {lost}", load, facility.feeds[feed].capacity


@settings(max_examples=150, deadline=None)
@given(facilities())
def test_all_that_fits_is_found_and_no_more(facility: Facility) -> None:
    found = capacity(facility)
    full = found.facility
    assert found.added == len(full.nodes) - len(facility.nodes)
    assert found.power == sum(rack.base_power for rack in full.racks.values()) + sum(
        TYPES[node.type].max_power for node in full.nodes.values()
    )
    before = broken(facility)
    assert broken(full) <= before, "nothing is broken that was not"
    said = [rack for rack in full.racks.values() if rack.fill] or [
        replace(rack, fill="small") for rack in full.racks.values() if facility.nodes
    ]
    for rack in said:
        more = replace(full, nodes={**full.nodes, "more": Node("more", rack.name, rack.fill)})
        units = _free_units(full, rack)
        assert broken(more) - before or before or units < TYPES[rack.fill].height_u, rack
    assert (found.binding is None) == (not said)


def _free_units(facility: Facility, rack: Rack) -> int:
    """The longest run of units that no node with a known place takes, less the heights of the others."""
    free = [True] * max(0, rack.height_u - rack.reserved_u)
    loose = 0
    for node in facility.nodes.values():
        if node.rack == rack.name and node.bottom_u:
            for unit in range(node.bottom_u - 1, min(len(free), node.bottom_u - 1 + TYPES[node.type].height_u)):
                free[unit] = False
        elif node.rack == rack.name:
            loose += TYPES[node.type].height_u
    longest = run = 0
    for unit in free:
        run = run + 1 if unit else 0
        longest = max(longest, run)
    return longest - loose


limits = st.integers(5, 400).map(lambda kilowatts: Watts(kilowatts * 1_000))


@settings(max_examples=60, deadline=None)
@given(limits, limits, st.integers(8, 48), st.integers(0, 100_000), st.sampled_from(["supply", "feeds", "height"]))
def test_more_of_anything_never_means_less(supply: Watts, feed: Watts, height: int, more: int, which: str) -> None:
    def nodes(supply: int, feed: int, height: int) -> int:
        feeds = (Feed("a", "A", Watts(feed)), Feed("b", "B", Watts(feed)))
        site = Site("s", supply=Watts(supply))
        envelope = Envelope(Rack("r", "s", fill="large", height_u=height), feeds)
        return capacity(Facility("f", node_types=TYPES, sites={"s": site}, envelopes=(envelope,))).nodes

    grown = {"supply": supply, "feeds": feed, "height": height}
    grown[which] += more if which != "height" else more % 48
    assert nodes(grown["supply"], grown["feeds"], grown["height"]) >= nodes(supply, feed, height)
