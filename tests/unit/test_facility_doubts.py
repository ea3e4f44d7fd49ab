"""What is doubtful in a facility is said, and what is sound raises no doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.planner import facility_file
from stoker.planner.core.doubts import doubts

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples/facilities").glob("*.yaml"))


def of(racks: str, more: str = "") -> list[str]:
    return doubts(facility_file.parse(f"name: f\nsites: {{s: {{{racks}}}}}\n{more}", "f.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_raise_no_doubt(path: Path) -> None:
    assert doubts(facility_file.read(path)) == []


def test_hosts_that_could_draw_more_than_a_feed_bears_after_a_loss() -> None:
    rack = "{feeds: {a: {usable_kw: 20}, b: {usable_kw: 20}}, nodes: {'n[1-2]': dgx-h100}}"
    assert of(f"racks: {{r: {rack}}}") == [
        f"feed {mine} after the loss of source {other} bears 20.0 kW; with all hosts at their most it would be "
        "20.4 kW: a plan leaves some GPUs there without work"
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    assert of(f"racks: {{r: {rack.replace('20}', '20.4}')}}}") == []


def test_what_a_rack_draws_besides_its_nodes_counts() -> None:
    rack = "{cooling_kw: 11, base_kw: 0.8, nodes: {n: dgx-h100}}"
    assert of(f"racks: {{r: {rack}}}") == []
    assert of(f"racks: {{r: {rack.replace('0.8', '0.9')}}}") == [
        "cooling of rack r carries off 11.0 kW; with all hosts at their most it would be 11.1 kW: a plan leaves some "
        "GPUs there without work"
    ]


def test_a_site_with_less_than_its_hosts_could_draw() -> None:
    assert of("supply_kw: 11, reserved_kw: 1, racks: {r: {nodes: {n: dgx-h100}}}")[0].startswith(
        "supply of site s bears 10.0 kW"
    )


def test_two_feeds_that_are_one() -> None:
    feeds = (
        "feeds: {ups: {usable_kw: 99}}, racks: {'r[1-9]': {feeds: {$rack-a: {parent: ups}, $rack-b: {parent: ups}}}}"
    )
    assert of(feeds) == ["all feeds of r[1-9] hang on ups, and are lost with it"]
    assert of(feeds.replace("{feeds: {$rack", "{survives_loss: false, feeds: {$rack")) == []


def test_ports_without_cables() -> None:
    fabric = "switches: {leaf: {radix: 8}, spare: {radix: 8}}\nlinks: [{lower: n1, upper: leaf, gbit_per_s: 400}]\n"
    assert of("racks: {r: {nodes: {'n[1-3]': dgx-h100}}}", fabric) == [
        "n[2-3] have ports on the fabric, but no cable",
        "no cable ends at spare",
    ]
    assert of("racks: {r: {nodes: {'n[1-3]': dgx-h100}}}") == []
