"""Ranges survive a round trip, garbage is refused in words, and fabrics keep their promises whatever their size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stoker.common.errors import StokerError
from stoker.planner import facility_file, importers
from stoker.planner.core.facility import fabrics
from stoker.planner.core.facility.ranges import BadRange, compressed, expand
from stoker.planner.core.facility.values import Link
from stoker.planner.core.ordering import natural
from stoker.planner.core.units import link_rate, watts
from stoker.planner.importers.part import Open

NAMES = st.from_regex(r"[a-z]{0,3}[0-9]{0,4}(-[a-z]{1,2}[0-9]{0,3})?", fullmatch=True).filter(bool)
KEYS = st.sampled_from(
    [
        "name",
        "sites",
        "racks",
        "nodes",
        "feeds",
        "type",
        "kw",
        "switches",
        "links",
        "fabrics",
        "r[1-3]",
        "$rack-a",
        "x",
        "node_types",
        "like",
        "include",
        "envelopes",
        "scale_up_domains",
        "rows",
        "suites",
        "height_u",
        "gpus",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=8) | st.sampled_from(
        ["dgx-h100", "gb200-nvl72", "n[1-4]", "$rack-n1", "n[1-", "x y", "node"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.sets(NAMES, min_size=1, max_size=40))
@example({"n08", "n09", "n10", "n9"})
@example({"0", "00", "000", "1"})
def test_names_survive_being_put_together(names: set[str]) -> None:
    texts = compressed(names)
    found = [name for text in texts for name in expand(text)]
    assert sorted(found) == sorted(names)
    assert expand(",".join(texts)) == found


@given(st.integers(0, 9999), st.integers(1, 300), st.integers(1, 5))
def test_a_range_is_one_text(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}}" for number in range(first, first + count)]
    texts = compressed(names)
    assert expand(",".join(texts)) == names
    if len(str(first)) == len(str(first + count - 1)) or width >= 5:
        assert len(texts) == 1


@given(st.text(alphabet="ab019[],-: ", max_size=24))
def test_any_text_is_a_range_or_refused(text: str) -> None:
    try:
        names = expand(text, most=1000)
    except BadRange:
        return
    assert 0 < len(names) <= 1000


@given(st.permutations(["n1", "n01", "n2", "n10", "m3", "n2-a", ""]))
def test_natural_order_is_the_same_from_any_order(names: list[str]) -> None:
    assert sorted(names, key=natural) == ["", "m3", "n01", "n1", "n2", "n2-a", "n10"]


@given(st.floats(0, 1e6))
def test_kilowatts_are_whole_watts(kilowatts: float) -> None:
    assert abs(watts(kilowatts) - kilowatts * 1000) <= 0.5
    assert abs(link_rate(kilowatts) * 8 - kilowatts * 1e9) <= 4


@settings(max_examples=150)
@given(VALUES)
def test_any_yaml_is_a_facility_or_refused_in_words(value: object) -> None:
    refused_or_read(yaml.safe_dump(value))


@settings(max_examples=100)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=4))
def test_a_broken_site_is_refused_in_words(site: dict[str, object], rack: dict[str, object]) -> None:
    whole = {"name": "f", "sites": {"s": {**site, "racks": {"r[1-2]": rack}}}}
    refused_or_read(yaml.safe_dump(whole))


@settings(max_examples=150)
@given(st.text(max_size=60))
@example("a: &a [*a]")
@example("\x00")
@example("- ? {")
def test_any_text_is_a_facility_or_refused_in_words(text: str) -> None:
    refused_or_read(text)


def refused_or_read(text: str) -> None:
    told = refusal(lambda: facility_file.parse(text, "f.yaml"))
    assert told is None or (told.reason == "BAD_FILE" and "f.yaml" in told.message)


def refusal(read: Callable[[], object]) -> StokerError | None:
    try:
        read()
    except StokerError as error:
        return error
    return None


@settings(max_examples=60)
@pytest.mark.parametrize("form", importers.FORMATS)
@given(text=st.text(max_size=80), value=VALUES)
def test_any_text_is_imported_or_refused_in_words(form: str, text: str, value: object) -> None:
    for each in (text, yaml.safe_dump(value, default_flow_style=True), json.dumps({"lldp": {"interface": value}})):
        told = refusal(lambda each=each: importers.FORMATS[form](each, "file", Open()))  # type: ignore[misc]
        assert told is None or told.reason == "BAD_FILE"


@settings(max_examples=80, deadline=None)
@given(
    nodes=st.integers(1, 200),
    per_leaf=st.integers(1, 32),
    ports=st.integers(1, 8),
    radix=st.sampled_from([8, 16, 32, 64]),
    over=st.sampled_from([1.0, 2.0, 3.0]),
    railed=st.booleans(),
)
def test_a_fabric_keeps_its_promises(
    nodes: int, per_leaf: int, ports: int, radix: int, over: float, railed: bool
) -> None:
    names = [f"n{number}" for number in range(nodes)]
    shape = fabrics.rails if railed else fabrics.clos
    asked = fabrics.Fabric("f", radix, link_rate(400), link_rate(400), over)
    leaves = shape("f", names, per_leaf, ports)
    try:
        switches, links = fabrics.built(asked, leaves)
    except fabrics.Unbuildable:
        assume(False)
    used: Counter[str] = Counter()
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    for link in links:
        used[link.lower] += link.count
        used[link.upper] += link.count
        up[link.lower] += link.count
        down[link.upper] += link.count
    assert all(used[name] == ports for name in names)
    assert all(used[switch.name] <= switch.radix for switch in switches)
    if len(leaves) > 1:
        assert all(up[leaf.name] * over >= down[leaf.name] for leaf in leaves)
        assert all(up[s.name] >= down[s.name] for s in switches if s.tier == 1 and any(t.tier == 2 for t in switches))
    assert reached(names[0], links) >= set(names)


def reached(start: str, links: list[Link]) -> set[str]:
    beside: dict[str, set[str]] = {}
    for link in links:
        beside.setdefault(link.lower, set()).add(link.upper)
        beside.setdefault(link.upper, set()).add(link.lower)
    seen, waiting = {start}, [start]
    while waiting:
        for name in beside.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen
