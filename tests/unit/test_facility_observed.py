"""Facilities from what agents report, merged with a file, and where both disagree."""

from __future__ import annotations

from dataclasses import replace

from stoker.planner import catalogue, facility_file
from stoker.planner.core.facility.checks import faults
from stoker.planner.core.facility.drift import Difference, Kind, drift
from stoker.planner.core.facility.observed import UNPLACED, ObservedGpu, ObservedNode, facility_of, merged
from stoker.planner.core.facility.values import Facility, Feed, Gpu
from stoker.planner.core.units import Bytes

H100 = "NVIDIA H100 80GB HBM3"
REPORTED = Bytes(81_559 << 20)

FILE = facility_file.parse(
    """
name: f
sites:
  fra:
    region: eu
    rows:
      row1:
        racks:
          r[1-2]:
            feeds: {$rack-a: {kw: 30}, $rack-b: {kw: 30}}
            nodes: {"n[1-2]": dgx-h100}
""",
    "f.yaml",
)


def node(name: str, gpus: int = 8, kind: str = H100, memory: Bytes = REPORTED, **labels: str) -> ObservedNode:
    found = tuple(ObservedGpu(at, kind, memory, numa=at // 4) for at in range(gpus))
    return ObservedNode(name, found, labels)


def unfiled(*nodes: ObservedNode) -> Facility:
    return facility_of(nodes, catalogue.load().gpu_types)


# --- without a file ---


def test_each_node_has_a_rack_of_its_own_without_limits() -> None:
    facility = unfiled(node("n1"), node("n2"))
    assert {n.rack for n in facility.nodes.values()} == {"rack:n1", "rack:n2"}
    rack = facility.racks["rack:n1"]
    assert (rack.site, rack.feeds, rack.cooling, rack.weight_kg) == (UNPLACED, (), None, None)
    assert faults(facility) == []


def test_labels_tell_the_place() -> None:
    facility = unfiled(
        node("n1", rack="r7", row="x", site="fra", region="eu", provider="own", feed="a"),
        node("n2", rack="r7", row="x", site="fra", region="eu", provider="own", feed="a,b"),
    )
    rack = facility.racks["r7"]
    assert (rack.site, rack.row, rack.feeds) == ("fra", "x", ("a", "b"))
    assert facility.sites["fra"].region == "eu"
    assert facility.feeds["b"] == Feed("b", source="b", capacity=None)


def test_a_rack_with_a_nodes_name_is_told_apart() -> None:
    facility = unfiled(node("n1"), node("n2", rack="n1"))
    assert facility.nodes["n2"].rack == "rack:n1"
    assert facility.nodes["n1"].rack != "n1"


def test_a_known_gpu_is_recognised_and_linked() -> None:
    facility = unfiled(node("n1"))
    assert facility.node_types[facility.nodes["n1"].type].gpu == "h100-sxm"
    assert facility.nodes["n1"].gpus[5] == Gpu(5, scale_up="n1", numa=1)


def test_an_unknown_gpu_has_its_memory_and_no_links() -> None:
    facility = unfiled(node("n1", kind="Maker X-1 (rev. 2)", memory=Bytes(10**9)))
    kind = facility.gpu_types["maker-x-1-rev-2"]
    assert (kind.memory, dict(kind.flops)) == (10**9, {})
    assert {gpu.scale_up for gpu in facility.nodes["n1"].gpus} == {""}


def test_groups_that_somebody_looked_at_are_kept() -> None:
    seen = replace(node("n1", gpus=4), scale_up_groups=((0, 1), (2, 3)), pcie_groups=((0, 2), (1, 3)))
    gpus = unfiled(seen).nodes["n1"].gpus
    assert [gpu.scale_up for gpu in gpus] == ["n1/0", "n1/0", "n1/1", "n1/1"]
    assert [gpu.pcie_root for gpu in gpus] == [0, 1, 0, 1]


def test_a_host_without_gpus() -> None:
    facility = unfiled(node("n1", gpus=0))
    assert facility.node_types[facility.nodes["n1"].type].gpus == 0


# --- with a file ---


def test_the_file_wins_on_place_and_power_the_agent_on_gpus() -> None:
    facility = merged(FILE, [node("n1", gpus=7, rack="r2")])
    n1 = facility.nodes["n1"]
    assert (n1.rack, n1.type, len(n1.gpus)) == ("r1", "dgx-h100", 7)
    assert n1.gpus[3] == FILE.nodes["n1"].gpus[3]
    assert facility.nodes["n2"] == FILE.nodes["n2"]
    assert facility.racks == FILE.racks


def test_the_agents_numa_holds() -> None:
    seen = ObservedNode("n1", (ObservedGpu(0, H100, REPORTED, numa=1), ObservedGpu(1, H100, REPORTED)))
    assert [gpu.numa for gpu in merged(FILE, [seen]).nodes["n1"].gpus] == [1, 0]


def test_a_gpu_that_the_file_lacks_is_in_the_nodes_domain() -> None:
    seen = ObservedNode("n1", (ObservedGpu(8, H100, REPORTED),))
    assert merged(FILE, [seen]).nodes["n1"].gpus == (Gpu(8, scale_up="n1"),)


def test_another_gpu_than_the_file_says_is_believed() -> None:
    facility = merged(FILE, [node("n1", kind="NVIDIA H200", memory=Bytes(143_771 << 20))])
    kind = facility.node_types[facility.nodes["n1"].type]
    assert (kind.gpu, kind.max_power) == ("h200-sxm", FILE.node_types["dgx-h100"].max_power)


def test_an_extra_node_stands_in_the_files_rack_that_its_label_names() -> None:
    facility = merged(FILE, [node("x", rack="r2"), node("y")])
    assert (facility.nodes["x"].rack, facility.nodes["y"].rack) == ("r2", "rack:y")
    assert facility.racks["r2"] == FILE.racks["r2"]


# --- drift ---


def differences(*nodes: ObservedNode) -> list[Difference]:
    return list(drift(FILE, nodes))


def test_what_agrees_is_no_drift() -> None:
    assert differences(node("n1"), node("n2", rack="r2", row="row1", region="eu")) == []


def test_nodes_missing_and_extra() -> None:
    assert differences(node("n2"), node("n10", rack="r9")) == [
        Difference("n1", Kind.MISSING_NODE, "dgx-h100 with 8 GPUs in r1", "no agent reports it"),
        Difference("n10", Kind.EXTRA_NODE, "not in the file", f"8 × {H100} in r9"),
    ]


def test_fewer_and_other_gpus() -> None:
    assert differences(node("n1", gpus=7), node("n2", kind="NVIDIA H200")) == [
        Difference("n1", Kind.GPU_COUNT, "8 GPUs", "7 GPUs"),
        Difference("n2", Kind.GPU_TYPE, "h100-sxm", "NVIDIA H200 (GPU 0)"),
    ]


def test_another_size_of_memory() -> None:
    told = Difference("n1", Kind.GPU_MEMORY, "86 GB", "94 GB (GPU 0)")
    assert differences(node("n1", memory=Bytes(94 * 10**9)), node("n2")) == [told]


def test_numa_that_differs_and_numa_that_nobody_knows() -> None:
    swapped = ObservedNode("n1", tuple(ObservedGpu(at, H100, REPORTED, numa=1 - at // 4) for at in range(8)))
    unknown = ObservedNode("n2", tuple(ObservedGpu(at, H100, REPORTED) for at in range(8)))
    [found] = differences(swapped, unknown)
    assert (found.node, found.kind) == ("n1", Kind.NUMA)
    assert found.said.startswith("GPU 0 at 0, GPU 1 at 0")
    assert found.seen.startswith("GPU 0 at 1, GPU 1 at 1")


def test_a_moved_node() -> None:
    assert differences(node("n1", rack="r2", row="row1"), node("n2")) == [
        Difference("n1", Kind.PLACE, "rack r1", "rack r2")
    ]


def test_links_that_somebody_looked_at() -> None:
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert differences(replace(node("n1"), scale_up_groups=halves, pcie_groups=halves), node("n2")) == [
        Difference("n1", Kind.SCALE_UP, "[0-7]", "[0-3] [4-7]"),
        Difference("n1", Kind.PCIE, "0 1 2 3 4 5 6 7", "[0-3] [4-7]"),
    ]
