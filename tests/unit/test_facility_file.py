"""Facility files: what is accepted, what comes of it, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.common.errors import Code, StokerError
from stoker.planner import facility_file, facility_names
from stoker.planner.core.facility.values import Facility, Feed, Gpu, Site
from stoker.planner.core.units import Watts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples/facilities").glob("*.yaml"))

R = "sites.fra.suites.s1.rows.row1.racks.r[1-2]"

SMALL = """\
name: small
sites:
  fra:
    region: eu
    supply_kw: 100
    reserved_kw: 10
    feeds: {ups-a: {kw: 100}, ups-b: {usable_kw: 60, source: grid}}
    suites:
      s1:
        rows:
          row1:
            racks:
              r[1-2]:
                reserved_u: 2
                feeds:
                  $rack-a: {parent: ups-a, volts: 230, amps: 32, phases: 1}
                  $rack-b: {parent: ups-b, kw: 10, derating: 1}
                nodes: {"n[01-04]": dgx-h100}
"""


def parsed(text: str) -> Facility:
    return facility_file.parse(text, "f.yaml")


def mistakes(text: str) -> list[str]:
    with pytest.raises(StokerError) as raised:
        parsed(text)
    assert raised.value.reason == "BAD_FILE"
    assert raised.value.code is Code.INVALID_ARGUMENT
    return raised.value.message.splitlines()


def changed(*replacements: tuple[str, str]) -> str:
    text = SMALL
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_a_facility_is_spelled_out() -> None:
    facility = parsed(SMALL)
    assert facility.sites == {"fra": Site("fra", region="eu", supply=Watts(100_000), reserved=Watts(10_000))}
    assert list(facility.racks) == ["r1", "r2"]
    rack = facility.racks["r2"]
    assert (rack.site, rack.suite, rack.row, rack.height_u, rack.reserved_u) == ("fra", "s1", "row1", 42, 2)
    assert rack.feeds == ("r2-a", "r2-b")
    assert {node.name: node.rack for node in facility.nodes.values()} == {
        "n01": "r1",
        "n02": "r1",
        "n03": "r2",
        "n04": "r2",
    }


def test_feeds_are_derated_and_know_what_they_fail_with() -> None:
    feeds = parsed(SMALL).feeds
    assert feeds["ups-a"] == Feed("ups-a", source="ups-a", capacity=Watts(80_000))
    assert feeds["ups-b"] == Feed("ups-b", source="grid", capacity=Watts(60_000))
    # 230 V × 32 A × 0.8, and 10 kW as it stands.
    assert feeds["r1-a"] == Feed("r1-a", source="ups-a", capacity=Watts(5_888), parent="ups-a")
    assert feeds["r1-b"] == Feed("r1-b", source="grid", capacity=Watts(10_000), parent="ups-b")


def test_three_phases_carry_the_root_of_three_as_much() -> None:
    text = changed(("volts: 230, amps: 32, phases: 1", "volts: 400, amps: 32"))
    assert parsed(text).feeds["r1-a"].capacity == round(400 * 32 * 3**0.5 * 0.8)


def test_a_feed_without_a_rating_is_unknown_not_zero() -> None:
    assert parsed(changed(("{kw: 100}", "{}"))).feeds["ups-a"].capacity is None


def test_gpus_are_laid_out_as_their_node_type_says() -> None:
    gpus = parsed(SMALL).nodes["n03"].gpus
    assert gpus[5] == Gpu(5, scale_up="n03", pcie_root=5, numa=1, rail=5)
    assert [gpu.numa for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_rack_that_is_one_domain() -> None:
    facility = parsed("{name: f, sites: {s: {racks: {'nvl[1-2]': gb200-nvl72}}}}")
    assert len(facility.nodes) == 36
    assert {gpu.scale_up for node in facility.nodes.values() for gpu in node.gpus} == {"nvl1", "nvl2"}
    power = facility.racks["nvl1"].base_power + 18 * facility.node_types["gb200-nvl72-tray"].max_power
    assert power == 120_000


def test_domains_may_be_named_across_nodes() -> None:
    facility = parsed(SMALL + "scale_up_domains: {d1: 'n[01-02]'}\n")
    assert {gpu.scale_up for gpu in facility.nodes["n02"].gpus} == {"d1"}
    assert {gpu.scale_up for gpu in facility.nodes["n03"].gpus} == {"n03"}


def test_groups_of_gpus_within_a_node() -> None:
    facility = parsed(
        "name: f\n"
        "node_types: {pairs: {like: l40s-8, scale_up: [[0, 1], [2, 3], [4, 5], [6, 7]]}}\n"
        "sites: {s: {racks: {r: {nodes: {n: pairs}}}}}\n"
    )
    assert [gpu.scale_up for gpu in facility.nodes["n"].gpus] == [f"n/{pair}" for pair in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_what_a_rack_says_holds_before_what_its_type_says() -> None:
    facility = parsed(
        "name: f\n"
        "rack_types: {std: {height_u: 48, cooling_kw: 20, nodes: {'$rack-n1': l40s-8}}}\n"
        "sites: {s: {racks: {r1: std, r2: {type: std, cooling_kw: 30, nodes: {'$rack-n2': l40s-8}}}}}\n"
    )
    assert (facility.racks["r1"].height_u, facility.racks["r1"].cooling) == (48, 20_000)
    assert (facility.racks["r2"].height_u, facility.racks["r2"].cooling) == (48, 30_000)
    assert list(facility.nodes) == ["r1-n1", "r2-n1", "r2-n2"]


def test_a_type_like_another_changes_what_it_says() -> None:
    facility = parsed("name: f\nnode_types:\n  a: {like: b, max_kw: 9}\n  b: {like: dgx-h100, height_u: 10}\n")
    assert facility.node_types["a"].max_power == 9_000
    assert facility.node_types["a"].height_u == 10
    assert facility.node_types["a"].gpus == 8


def test_nodes_stand_on_each_other() -> None:
    facility = parsed(changed(("dgx-h100}", "{type: dgx-h100, bottom_u: 3, labels: {pool: a}}}")))
    assert [facility.nodes[name].bottom_u for name in ("n01", "n02", "n03", "n04")] == [3, 11, 3, 11]
    assert facility.nodes["n01"].labels == {"pool": "a"}


def test_all_mistakes_of_form_are_told_at_once() -> None:
    text = changed(("supply_kw: 100", "supply_kw: -5"), ("reserved_u: 2", "hight_u: 2"), ("kw: 10,", "kw: ten,"))
    assert mistakes(text) == [
        "f.yaml:5: sites.fra.supply_kw: -5 must be at least 0",
        f"f.yaml:14: {R}.hight_u: no such setting; did you mean height_u?",
        f"f.yaml:17: {R}.feeds.$rack-b.kw: 'ten' is no number",
    ]


def test_all_mistakes_of_meaning_are_told_at_once() -> None:
    text = changed(
        ("parent: ups-a,", "parent: ups-c,"), ("dgx-h100", "dgx-h10"), ("reserved_kw: 10", "reserved_kw: 200")
    )
    assert mistakes(text) == [
        "f.yaml:6: sites.fra.reserved_kw: 200 is more than supply_kw, 100",
        f"f.yaml:16: {R}.feeds.$rack-a: r1-a: parent 'ups-c' does not exist; name one under `feeds`",
        f"f.yaml:16: {R}.feeds.$rack-a: r2-a: parent 'ups-c' does not exist; name one under `feeds`",
        f"f.yaml:18: {R}.nodes.n[01-04]: no such node type as 'dgx-h10'; did you mean dgx-h100?",
    ]


FAULTS = {
    "a name twice": (
        SMALL + "switches: {n01: {radix: 64}}\n",
        f"f.yaml:19: switches.n01: the name n01 is taken already, by {R}.nodes.n[01-04]; names are unique over all",
    ),
    "a rack too full": (
        changed(('"n[01-04]": dgx-h100', '"n[01-12]": dgx-h100')),
        f"f.yaml:13: {R}: r1: its 6 nodes are 48 U high beside 2 U reserved; it has 42 U",
    ),
    "a rack too heavy": (
        changed(("reserved_u: 2", "weight_kg: 200")),
        f"f.yaml:13: {R}: r1: its 2 nodes weigh 260.9 kg; it bears 200 kg",
    ),
    "nodes in each other": (
        changed(
            (
                '"n[01-04]": dgx-h100',
                '"$rack-x": {type: dgx-h100, bottom_u: 5}, "$rack-y": {type: dgx-h100, bottom_u: 9}',
            )
        ),
        f"f.yaml:18: {R}.nodes.$rack-y: r1-y: stands in the same units of r1 as r1-x; mend bottom_u of one",
    ),
    "a node above the rack": (
        changed(('"n[01-04]": dgx-h100', '"$rack-x": {type: dgx-h100, bottom_u: 40}')),
        f"f.yaml:18: {R}.nodes.$rack-x: r1-x: reaches up to unit 47 of r1, which has 42 U",
    ),
    "a loop of feeds": (
        changed(("{kw: 100}", "{kw: 100, parent: ups-b}"), ("source: grid", "parent: ups-a")),
        "f.yaml:7: sites.fra.feeds.ups-a: ups-a: is fed by itself, through ups-b; a feed tree has a top",
    ),
    "a rating twice": (
        changed(("{kw: 100}", "{kw: 100, usable_kw: 3}")),
        "f.yaml:7: sites.fra.feeds.ups-a: give one of kw, usable_kw, or volts with amps",
    ),
    "half a rating": (
        changed(("{kw: 100}", "{volts: 400}")),
        "f.yaml:7: sites.fra.feeds.ups-a: volts and amps belong together",
    ),
    "a feed for two racks": (
        changed(("$rack-a:", "the-a:")),
        f"f.yaml:16: {R}.feeds.the-a: feed the-a is there already, by "
        f"{R}.feeds.the-a; put $row or $rack into its name",
    ),
    "nodes that cannot be dealt out": (
        changed(("n[01-04]", "n[01-05]")),
        f"f.yaml:18: {R}.nodes.n[01-05]: 5 nodes cannot be dealt out evenly to 2 "
        "racks; name as many for each, or put $rack into the name",
    ),
    "an unknown variable": (
        changed(("$rack-a", "$rock-a")),
        f"f.yaml:16: {R}.feeds.$rock-a: $rock has no value; known: $site, $suite, $row, $rack",
    ),
    "a range backwards": (
        changed(("n[01-04]", "n[04-01]")),
        f"f.yaml:18: {R}.nodes.n[04-01]: 'n[04-01]': '04-01' runs backwards",
    ),
    "far too many": (
        changed(("n[01-04]", "n[1-999999]")),
        f"f.yaml:18: {R}.nodes.n[1-999999]: 'n[1-999999]' stands for more than 100000 names",
    ),
    "no name": (SMALL.replace("name: small\n", ""), "f.yaml:1: name: missing; it must be given"),
    "a link to nobody": (
        SMALL + "switches: {leaf: {radix: 8}}\nlinks:\n  - {lower: n09, upper: leaf, gbit_per_s: 400}\n",
        "f.yaml:21: links.0: n09: no such node or switch; a link from n09 to leaf names it",
    ),
    "a link upside down": (
        SMALL + "switches: {leaf: {radix: 8}}\nlinks:\n  - {lower: leaf, upper: n01, gbit_per_s: 400}\n",
        f"f.yaml:18: {R}.nodes.n[01-04]: n01: is the upper end of the link from leaf; only switches are",
    ),
    "more cables than ports": (
        SMALL
        + "switches: {leaf: {radix: 8}}\nlinks:\n  - {lower: 'n[01-04]', upper: leaf, gbit_per_s: 400, count: 3}\n",
        "f.yaml:19: switches.leaf: leaf: 12 cables end at it; it has 8 ports",
    ),
    "more cables than a node has ports": (
        SMALL + "switches: {leaf: {radix: 64}}\nlinks:\n  - {lower: n01, upper: leaf, gbit_per_s: 400, count: 9}\n",
        f"f.yaml:18: {R}.nodes.n[01-04]: n01: 9 cables begin at it; its type has fabric_ports: 8",
    ),
    "a leaf too small": (
        SMALL + "fabrics: {ib: {kind: rail-optimised, nodes: 'n[01-04]', radix: 6}}\n",
        "f.yaml:19: fabrics.ib: ib: leaf ib-su0-leaf0 needs 4 ports down and 4 up, a switch has 6; put fewer nodes "
        "at a leaf, allow more oversubscription, or use switches of more ports",
    ),
    "a fabric of nobody": (
        SMALL + "fabrics: {ib: {kind: clos, nodes: 'n[04-06]'}}\n",
        "f.yaml:19: fabrics.ib: no such node as 'n05', nor 1 more; did you mean n04?",
    ),
    "a distance to nowhere": (
        SMALL + "distances: [{between: [eu, us], latency_ms: 40}]\n",
        "f.yaml:19: distances.0: no site is in region 'us'; known: eu",
    ),
    "a layout that does not fit": (
        SMALL + "node_types: {x: {like: dgx-h100, numa: [0, 1]}}\n",
        "f.yaml:19: node_types.x.numa: has 2 values for 8 GPUs; give one for each",
    ),
    "likeness without end": (
        SMALL + "node_types: {x: {like: y}, y: {like: x}}\n",
        "f.yaml:19: node_types.x.like: x is like y is like x: that never ends",
    ),
    "GPUs of no type": (
        SMALL + "node_types: {x: {height_u: 1, weight_kg: 1, max_kw: 1, gpus: 4}}\n",
        "f.yaml:19: node_types.x: give both gpu and gpus, or none of them for a host without GPUs",
    ),
    "a last leaf with too few cables for the spines": (
        SMALL + "fabrics: {ib: {kind: rail-optimised, nodes: 'n[01-04]', nodes_per_leaf: 3, radix: 16}}\n",
        "f.yaml:19: fabrics.ib: ib: 2 spines, but some leaf has 1 uplinks and must reach them all; ask for a greater "
        "radix, leaves with as many nodes each, or less oversubscription",
    ),
    "a name that steers a terminal": (
        SMALL + 'switches: {"\\e[31m\\u202Eleaf": {radix: 64}}\n',
        r"f.yaml:19: switches.\x1b[31m\u202eleaf: '\x1b[31m\u202eleaf' has brackets that do not match",
    ),
    "an alias": (
        SMALL + "switches: &s {}\nlinks: *s\n",
        "f.yaml:20: no valid YAML: aliases (*name) are not read in this file",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_with_its_line(fault: str) -> None:
    text, told = FAULTS[fault]
    assert told in mistakes(text)


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "name: [a", "[" * 5000, '"\\UFFFFFFFF"', "a: &a [*a]", "? [a]\n: b\n"]
)
def test_what_is_no_facility_is_refused(text: str) -> None:
    assert mistakes(text)


def test_included_files_add_to_it_and_yield_to_it(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(SMALL + "include: [more/net.yaml]\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/net.yaml").write_text(
        "name: other\nswitches: {leaf: {radix: 64}}\ninclude: [../f.yaml]\n"
        "links: [{lower: 'n[01-04]', upper: leaf, gbit_per_s: 100}]\nsites: {fra: {provider: own, region: us}}\n"
    )
    facility = facility_file.read(tmp_path / "f.yaml")
    assert (facility.name, len(facility.links)) == ("small", 4)
    assert (facility.sites["fra"].provider, facility.sites["fra"].region) == ("own", "eu")


def test_a_mistake_in_an_included_file_is_told_there(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(SMALL + "include: [net.yaml]\n")
    (tmp_path / "net.yaml").write_text("switches:\n  leaf: {}\n")
    with pytest.raises(StokerError, match=r"net\.yaml:2: switches\.leaf\.radix: missing; it must be given"):
        facility_file.read(tmp_path / "f.yaml")


def test_a_file_that_is_not_there_is_told_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(SMALL + "include: [none.yaml]\n")
    with pytest.raises(StokerError, match=r"f\.yaml:19: include: cannot read .*none\.yaml: No such file"):
        facility_file.read(tmp_path / "f.yaml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_facilities(path: Path) -> None:
    assert facility_file.read(path).name == path.stem


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_file_written_as_one_is_the_same_facility(path: Path) -> None:
    assert facility_file.parse(facility_file.whole(path), "whole") == facility_file.read(path)


def test_the_pod_is_cabled_without_blocking() -> None:
    facility = facility_file.read(ROOT / "examples/facilities/two-rows.yaml")
    assert sum(len(node.gpus) for node in facility.nodes.values()) == 256
    tiers = [switch.tier for switch in facility.switches.values()]
    assert (tiers.count(0), tiers.count(1)) == (8, 4)
    assert sum(link.count for link in facility.links if link.lower in facility.nodes) == 256
    assert sum(link.count for link in facility.links if link.lower in facility.switches) == 256


def test_a_text_cannot_include_files() -> None:
    assert mistakes(SMALL + "include: [net.yaml]\n")[0].startswith("f.yaml:19: include: files beside this text")


NONE_ALIKE = "more than 20,000 things; that is rather a slip than a facility"
BOMBS = {
    "ranges within ranges": ("{rows: {'row[1-9999]': {racks: {'$row-r[1-9999]': {}}}}}", "", NONE_ALIKE),
    "a million GPUs": (
        "{racks: {'r[1-9000]': {nodes: {'$rack-n': x}}}}",
        "node_types: {x: {height_u: 1, weight_kg: 1, max_kw: 1, gpu: l40s, gpus: 1000}}\n",
        NONE_ALIKE,
    ),
    "every switch to every other": (
        "{}",
        "switches: {'s[1-200]': {radix: 9}}\nlinks: [{lower: 's[1-200]', upper: 's[1-200]', gbit_per_s: 1}]\n",
        NONE_ALIKE,
    ),
    "a tower of feeds": (
        "{feeds: {f0: {kw: 1}, " + ", ".join(f"f{n}: {{parent: f{n - 1}}}" for n in range(1, 30)) + "}}",
        "",
        "f29: has no top within 20 feeds above it",
    ),
    "a long likeness": (
        "{}",
        "node_types: {x0: {like: l40s-8}, " + ", ".join(f"x{n}: {{like: x{n - 1}}}" for n in range(1, 30)) + "}\n",
        "x29 is like x28 is like x27 is like x26 is like x25: that never ends",
    ),
    "thousands of unknown nodes": (
        "{}",
        "scale_up_domains: {d: 'x[1-9000]'}\n",
        "f.yaml:3: scale_up_domains.d: no such node as 'x1', nor 8999 more; there is none yet",
    ),
    "the same fault in every rack": (
        "{racks: {'r[1-500]': {feeds: [nowhere]}}}",
        "",
        "f.yaml:2: sites.s.racks.r[1-500]: and 498 more faults of what stands here",
    ),
    "hundreds of mistakes": (
        "{racks: {" + ", ".join(f"r{n}: {{rocks: 1}}" for n in range(300)) + "}}",
        "",
        "and 200 mistakes more",
    ),
    "thousands of mistakes, each with a hint to be found": (
        "{racks: {r: {nodes: {" + ", ".join(f"n{n}: dgx-h{n}" for n in range(3_000)) + "}}}}",
        "",
        "and at least 400 mistakes more",
    ),
    "a rack type of more nodes than a rack has units": (
        "{}",
        "rack_types: {t: {nodes: {'$rack-n[1-101]': l40s-8}}}\n",
        "'rack-n[1-101]' stands for more than 100 names",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_is_far_too_much_is_refused_in_few_words(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facility_names, "MOST_THINGS", 20_000)  # of a million, for the sake of time
    site, more, told = BOMBS[bomb]
    lines = mistakes(f"name: f\nsites: {{s: {site}}}\n{more}")
    assert any(line.endswith(told) for line in lines)
    assert len(lines) <= 101


@pytest.mark.parametrize(
    "text",
    [
        "sites: {'': {}}",
        'sites: {"\\e[31mfra": {}}',
        'sites: {s: {supply_kw: 200, envelopes: {"a b": gb200-nvl72}}}',
        "sites: {s: {racks: {r: {nodes: {'n[1-2]': l40s-8}}}}}\nfabrics: {\"a b\": {kind: clos, nodes: n1}}",
        "sites: {s: {racks: {r: {nodes: {'n[1-2]': l40s-8}}}}}\nscale_up_domains: {\"a b\": n1}",
    ],
)
def test_what_is_named_without_a_range_has_a_proper_name_too(text: str) -> None:
    assert any("is no name: letters, digits" in line for line in mistakes(f"name: f\n{text}\n"))


@pytest.mark.parametrize("rate", ["-1", "0", "1e308"])
def test_rates_of_a_gpu_are_above_nothing(rate: str) -> None:
    gpu = f"{{memory_gb: 24, memory_gb_per_s: 1008, max_w: 450, tflops: {{bf16: {rate}}}}}"
    [told] = mistakes(f"name: f\nsites: {{s: {{}}}}\ngpu_types: {{g: {gpu}}}\n")
    assert told.startswith("f.yaml:3: gpu_types.g.tflops.bf16: ")


def test_a_device_is_read_no_further_than_a_file_may_be_long() -> None:
    with pytest.raises(StokerError, match="/dev/zero has more than 16,777,216 bytes"):
        facility_file.read(Path("/dev/zero"))


def test_a_facilitys_own_name_is_bounded() -> None:
    assert facility_file.parse(f"name: {'x' * 127}\nsites: {{}}\n", "it").name == "x" * 127
    with pytest.raises(StokerError, match="it:1: name: has 1,000 characters; at most 127"):
        facility_file.parse(f"name: {'x' * 1_000}\nsites: {{}}\n", "it")
    with pytest.raises(StokerError, match="has control characters; write it without"):
        facility_file.parse('name: "a\\x1b[31m"\nsites: {}\n', "it")
