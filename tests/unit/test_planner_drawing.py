"""Drawings by what they show: every GPU once, bars as high as their watts, nothing over anything else."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from xml.etree import ElementTree as ET  # only what was drawn here is read

import pytest

from stoker.planner.core.envelope import capacity
from stoker.planner.core.facility.values import (
    Envelope,
    Facility,
    Feed,
    Gpu,
    Link,
    Node,
    NodeType,
    Rack,
    Site,
    Switch,
)
from stoker.planner.core.placement import Member, Need, Placed
from stoker.planner.core.units import link_rate, watts
from stoker.planner.drawing import colours, feeds
from stoker.planner.drawing.page import View, drawn, page
from stoker.planner.drawing.scene import Scene

DGX = NodeType("dgx", 8, 130.0, watts(10), watts(2), "h100", 8, 8, link_rate(400))
TRAY = NodeType("tray", 1, 30.0, watts(6), watts(2), "gb200", 4, 4, link_rate(400))
STORE = NodeType("store", 2, 30.0, watts(1), watts(1))


@dataclass(frozen=True)
class Box:
    """A rectangle of a drawing, in its coordinates."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    said: Mapping[str, str]

    def over(self, other: Box) -> bool:
        return (
            min(self.x + self.width, other.x + other.width) - max(self.x, other.x) > 0.01
            and min(self.y + self.height, other.y + other.height) - max(self.y, other.y) > 0.01
        )


def boxes(svg: str, kind: str) -> list[Box]:
    """The boxes of a class, where they come to lie."""
    return [box for box in _walked(_tree(svg), 0.0, 0.0) if kind in box.said.get("class", "").split()]


def _tree(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - our own


def _walked(element: ET.Element, x: float, y: float) -> Iterator[Box]:
    moved = re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    if element.tag.endswith("}rect") and element.get("x"):
        at = {key: float(element.get(key, "0")) for key in ("x", "y", "width", "height")}
        yield Box(x + at["x"], y + at["y"], at["width"], at["height"], element.get("fill", ""), element.attrib)
    for child in element:
        yield from _walked(child, x, y)


def facility(dgx: int = 8, trays: int = 18) -> Facility:
    feeds = {side: Feed(side, side, watts(200)) for side in "AB"}
    racks: dict[str, Rack] = {}
    nodes: dict[str, Node] = {}
    for number in range(-(-dgx // 4) + 1):
        name = f"r{number}"
        feeds |= {f"{name}-{side}": Feed(f"{name}-{side}", side, watts(30 + 35 * number), side) for side in "AB"}
        racks[name] = Rack(name, "s", "hall", "row", feeds=(f"{name}-A", f"{name}-B"), base_power=watts(1))
    for number in range(dgx):
        name = f"n{number}"
        nodes[name] = Node(name, f"r{number // 4}", "dgx", tuple(Gpu(at, name, rail=at) for at in range(8)))
    last = list(racks)[-1]
    for number in range(trays):
        nodes[f"t{number}"] = Node(f"t{number}", last, "tray", tuple(Gpu(at, "nvl") for at in range(4)))
    nodes["s0"] = Node("s0", last, "store")
    switches = {f"leaf{at}": Switch(f"leaf{at}", 0, 64) for at in range(4)} | {"spine": Switch("spine", 1, 64)}
    links = [Link(name, f"leaf{2 * (name[0] == 't') + at}", link_rate(400), 2) for name in nodes for at in range(2)]
    links += [Link(f"leaf{at}", "spine", link_rate(400), 4) for at in range(4)]
    return Facility(
        "drawn",
        node_types={kind.name: kind for kind in (DGX, TRAY, STORE)},
        sites={"s": Site("s", supply=watts(500))},
        feeds=feeds,
        racks=racks,
        nodes=nodes,
        switches=switches,
        links=tuple(links),
    )


PLACED = (
    Placed("chat-0", "chat", (Member("n0", tuple(range(8))), Member("n1", tuple(range(8))))),
    Placed("chat-1", "chat", (Member("n2", (0, 1, 2, 3)),)),
    Placed("code-0", "code", (Member("n2", (4, 5)),)),
    Placed("moe-0", "moe", tuple(Member(f"t{at}", (0, 1, 2, 3)) for at in range(8))),
)
NEEDS = (Need("chat", 2, 8, 2), Need("code", 1, 2, busy_power=watts(0.5)), Need("moe", 1, 4, 8))
GPUS = 8 * 8 + 18 * 4


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene.of_placement(facility(), PLACED, NEEDS, closed=frozenset({"n3"}))


@pytest.mark.parametrize("view", [View.RACKS, View.FABRIC])
def test_every_gpu_is_drawn_once_in_its_replicas_colour(scene: Scene, view: View) -> None:
    gpus = boxes(drawn(scene, view), "gpu")
    drawn_gpus = Counter(box.said["data-gpu"] for box in gpus)
    assert len(drawn_gpus) == GPUS
    assert set(drawn_gpus.values()) == {1}
    owners = {f"{node}:{index}": owner.replica for (node, index), owner in scene.owners.items()}
    assert {box.said["data-gpu"]: box.said["data-replica"] for box in gpus if "data-replica" in box.said} == owners
    by_replica = defaultdict(set)
    for box in gpus:
        by_replica[box.said.get("data-replica", "")].add(box.fill)
    assert all(len(fills) == 1 for fills in by_replica.values())
    assert by_replica[""] == {colours.FREE}
    assert len({next(iter(fills)) for fills in by_replica.values()}) == len(by_replica)


def test_colours_are_the_same_in_all_views(scene: Scene) -> None:
    racks, fabric = (
        {b.said["data-gpu"]: b.fill for b in boxes(drawn(scene, v), "gpu")} for v in (View.RACKS, View.FABRIC)
    )
    assert racks == fabric


@pytest.mark.parametrize("nodes", [8, 60, 400])
def test_nothing_lies_over_anything_else(nodes: int) -> None:
    given = facility(dgx=nodes)
    made = Scene.of_placement(given, PLACED, NEEDS)
    for view in (View.RACKS, View.FABRIC):
        svg = drawn(made, view)
        for kind in ("gpu", "node", "switch"):
            found = sorted(boxes(svg, kind), key=lambda box: (box.y, box.x))
            assert not [pair for pair in _near(found) if pair[0].over(pair[1])], (view, kind)
        _, _, width, height = map(float, _tree(svg).get("viewBox", "").split())
        assert all(
            box.x >= 0 and box.x + box.width <= width and box.y >= 0 and box.y + box.height <= height
            for box in _walked(_tree(svg), 0.0, 0.0)
        )


def _near(found: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that could lie over each other: those that begin in the same band of height."""
    bands: dict[int, list[Box]] = defaultdict(list)
    for box in found:
        for band in range(int(box.y // 50), int((box.y + box.height) // 50) + 1):
            bands[band].append(box)
    for members in bands.values():
        yield from combinations(members, 2)


def test_bars_are_as_high_as_their_watts(scene: Scene) -> None:
    svg = drawn(scene, View.RACKS)
    lowest = {name for rack in scene.facility.racks.values() for name in rack.feeds}
    scales = set()
    for kind in ("normal", "after"):
        bars = {box.said["data-feed"]: box for box in boxes(svg, f"power-{kind}")}
        assert lowest <= bars.keys()
        for feed in lowest:
            load = scene.loads[feed]
            scales.add(round(bars[feed].height / (load.normal if kind == "normal" else load.worst), 4))
    assert max(scales) - min(scales) <= 1.1e-4, "one scale for all racks"


def test_loads_are_those_of_the_gpus_in_use_and_double_after_a_loss(scene: Scene) -> None:
    # Four hosts idle at 2 kW and a rack's switches at 1 kW; 20 GPUs at a kW each, two at 0.5 kW.
    assert scene.by_rack["r0"] == 4 * 2_000 + 1_000 + 20 * 1_000 + 2 * 500
    assert scene.loads["r0-A"].normal == pytest.approx(15_000)
    assert scene.loads["r0-A"].worst == pytest.approx(30_000)
    assert scene.loads["r0-A"].lost == "B"


def test_what_is_over_capacity_is_told_in_colour() -> None:
    given = facility()
    weak = replace(given, feeds={**given.feeds, "r0-A": Feed("r0-A", "A", watts(20), "A")})
    made = Scene.of_placement(weak, PLACED, NEEDS)
    after = {box.said["data-feed"]: box.fill for box in boxes(drawn(made, View.RACKS), "power-after")}
    assert after["r0-A"] == colours.OVER
    assert {fill for feed, fill in after.items() if feed != "r0-A"} == {colours.AFTER}
    assert "15 → 30 of 20 kW" in drawn(made)


def test_nodes_stand_on_their_units(scene: Scene) -> None:
    nodes = {box.said["data-node"]: box for box in boxes(drawn(scene, View.RACKS), "node")}
    assert nodes.keys() == scene.facility.nodes.keys()
    assert nodes["n1"].y + nodes["n1"].height < nodes["n0"].y + 0.1, "the second stands on the first"
    assert nodes["n0"].height + 1 == pytest.approx(8 * (nodes["t0"].height + 1)), "8 U are eight times 1 U"


def test_narrow_uplinks_are_told(scene: Scene) -> None:
    svg = drawn(scene, View.FABRIC)
    assert "9 : 1 oversubscribed" in svg
    assert "4.5 : 1 oversubscribed" in svg
    assert "NVLink nvl" in svg


def test_a_page_needs_nothing_else_and_runs_no_names_as_code() -> None:
    hostile = '"><script>alert(1)</script>'
    given = facility(dgx=4, trays=0)
    node = replace(given.nodes["n0"], name=hostile)
    given = replace(given, name=hostile, nodes={**given.nodes, hostile: node}, links=())
    placed = (Placed(hostile, hostile, (Member(hostile, (0,)),)),)
    text = page(Scene.of_placement(given, placed, (Need(hostile, 1),)), [(hostile, [[hostile], [hostile]])])
    assert "<script>alert" not in text
    assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|@import|src=", text)


def test_a_facility_to_be_filled_is_drawn_full() -> None:
    empty = Facility(
        "f",
        node_types={"dgx": DGX},
        sites={"s": Site("s", supply=watts(55))},
        envelopes=(Envelope(Rack("r", "s", fill="dgx"), (Feed("a", "A", watts(25)), Feed("b", "B", watts(25)))),),
    )
    made = Scene.of_capacity(capacity(empty), empty)
    assert len(boxes(drawn(made), "gpu")) == 5 * 8
    assert "dashed: 5 nodes that are not there yet" in drawn(made)


def test_bars_say_what_they_show(scene: Scene) -> None:
    bar = feeds.of_rack(scene, scene.facility.racks["r0"])[0]
    assert (bar.name, bar.told) == ("A", "15 → 30 of 30 kW")
    assert bar.title == "r0-A: 15 kW, 30 kW after the loss of B; may carry 30 kW"


def test_more_deployments_than_colours_is_told() -> None:
    given = facility(dgx=8, trays=0)
    placed = tuple(Placed(f"d{at}-0", f"d{at}", (Member(f"n{at % 8}", (at // 8,)),)) for at in range(14))
    assert "colours repeat" in drawn(Scene.of_placement(given, placed, ()))


def test_replicas_on_hosts_without_gpus_are_drawn_in_their_slots() -> None:
    given = facility()
    store = next(name for name, node in given.nodes.items() if node.type == "store")
    placed = [Placed(f"tiny-{n}", "tiny", (Member(store),)) for n in range(2)]
    scene = Scene.of_placement(given, placed, [Need("tiny", 2, gpus=0)])
    mine = [box for box in boxes(drawn(scene, View.RACKS), "gpu") if "data-replica" in box.said]
    assert [box.said["data-replica"] for box in mine] == ["tiny-0", "tiny-1"]
    assert len({box.fill for box in mine} - {colours.FREE}) == 2
    told = drawn(scene)
    assert "tiny: 2 without GPUs" in told
    assert f"tiny-0, rank 0 · {store} slot 0" in told
    assert f"free: {sum(len(node.gpus) for node in given.nodes.values())}" in told


def test_notes_go_on_the_next_line_and_lose_nothing() -> None:
    note = " ".join(f"word{n}" for n in range(60))
    svg = drawn(Scene.of_placement(facility(), [], [], (note,)))
    assert " ".join(re.findall(r"word\d+", svg)) == note


def test_units_kept_for_switches_are_in_the_legend() -> None:
    given = facility()
    kept = {name: replace(rack, reserved_u=2) for name, rack in given.racks.items()}
    assert "kept for switches" not in drawn(Scene.of_placement(given, [], [])).replace("<title>kept", "")
    assert ">kept for switches</text>" in drawn(Scene.of_placement(replace(given, racks=kept), [], []))
