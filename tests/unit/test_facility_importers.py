"""What other tools write, read as parts of a facility file that a whole one can include."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stoker.common.errors import StokerError
from stoker.planner import facility_file, importers
from stoker.planner.core.facility.values import Facility, Gpu
from stoker.planner.facility_schema import RackEntry
from stoker.planner.importers import nvidia_topo
from stoker.planner.importers.part import Imported, Open

DATA = Path(__file__).resolve().parents[1] / "data/imports"


def imported(form: str, file: str, **left_open: object) -> Imported:
    return importers.read(form, [DATA / file], Open(**left_open))  # type: ignore[arg-type]


def alone(form: str, file: str, node_type: str, **left_open: object) -> Facility:
    """The part as a facility: written, and read again."""
    part = imported(form, file, node_types={"": node_type}, **left_open).part
    return facility_file.parse(f"name: imported\n{facility_file.written(part)}", "part.yaml")


def refused(form: str, text: str) -> str:
    with pytest.raises(StokerError) as raised:
        importers.FORMATS[form](text, "file", Open())
    assert raised.value.reason == "BAD_FILE"
    return raised.value.message


# --- topograph ---


def test_topograph_gives_the_tree_and_the_domains() -> None:
    facility = alone("topograph", "topograph.json", "gb200-nvl72-tray")
    assert {name: switch.tier for name, switch in facility.switches.items()} == {
        "leaf-a": 0,
        "leaf-b": 0,
        "leaf-c": 0,
        "spine-1": 1,
        "spine-2": 1,
        "core": 2,
    }
    assert {gpu.scale_up for gpu in facility.nodes["tray-19"].gpus} == {"nvl-2"}
    assert sum(link.count for link in facility.links if link.upper == "core") == 40


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"instances"', "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"instances": [{"id": 3}]}', "Expected `str`, got `int` - at `$.instances[0].id`"),
        ('{"instances": [{"id": "!!!"}]}', "'!!!' cannot be made a name"),
        ('{"instances": [{"id": "a", "network_layers": ["x", "y", "x"]}]}', "x is above itself"),
        (
            '{"instances": [{"id": "a", "network_layers": ["x", "y"]}, {"id": "b", "network_layers": ["x", "z"]}]}',
            "x is below y and below z; that is no tree",
        ),
    ],
)
def test_topograph_that_is_none(text: str, told: str) -> None:
    assert told in refused("topograph", text)


# --- slurm ---


def test_a_slurm_tree() -> None:
    facility = alone("slurm", "topology-tree.conf", "dgx-h100", oversubscription=2.0, gbit_per_s=200.0)
    assert len(facility.nodes) == 37
    cables = {(link.lower, link.upper): link.count for link in facility.links if link.lower in facility.switches}
    assert cables == {("leaf1", "spine1"): 8, ("leaf2", "spine1"): 8, ("leaf3", "spine1"): 3}
    assert {link.rate for link in facility.links} == {200e9 / 8}


def test_slurm_blocks_are_domains() -> None:
    facility = alone("slurm", "topology-block.conf", "gb200-nvl72-tray")
    domains = {gpu.scale_up for name in ("tray01", "tray18") for gpu in facility.nodes[name].gpus}
    assert domains == {"nvl1"}
    assert {gpu.scale_up for gpu in facility.nodes["tray19"].gpus} == {"nvl2"}


def test_what_slurm_does_not_say_is_told() -> None:
    assert imported("slurm", "topology-tree.conf").notes == (
        "the format says no rates: cables of 400 Gbit/s, oversubscription 1 at each switch",
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "file: describes no switch and no block"),
        ("hello\n", "file:1: expected SwitchName=, BlockName= or BlockSizes=, found 'hello'"),
        ("\n# x\nFoo=bar\n", "file:3: expected SwitchName=, BlockName= or BlockSizes=, found 'Foo=bar'"),
        ("SwitchName=a Nodes=n[1-\n", "file:1: 'n[1-' has brackets that do not match"),
        ("SwitchName=a Nodes=n[1-9999999]\n", "file:1: 'n[1-9999999]' stands for more than 100000 names"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "file:2: switch a is described twice"),
        ("SwitchName=a\n", "file:1: switch a has neither Nodes nor Switches"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "file: a is above itself"),
        ("SwitchName=a Switches=b\n", "file: a is above itself, above a switch that is not described"),
    ],
)
def test_slurm_that_is_none(text: str, told: str) -> None:
    assert refused("slurm", text).startswith(told)


# --- netbox ---


def test_netbox_gives_racks_and_the_nodes_in_them() -> None:
    found = imported("netbox", "netbox.json")
    facility = facility_file.parse(f"name: f\n{facility_file.written(found.part)}", "part.yaml")
    assert {n.name: (n.rack, n.bottom_u) for n in facility.nodes.values()} == {
        "dgx-01": ("A-01", 3),
        "dgx-02": ("A-01", 11),
        "dgx-03": ("A02", 3),
    }
    rack = facility.racks["A-01"]
    assert (rack.site, rack.suite, rack.height_u, rack.weight_kg) == ("FRA-1", "Hall-A", 48, 1134.0)
    assert facility.racks["A02"].reserved_u == 2
    assert [note.split(" are ")[0] for note in found.notes] == [
        "2 devices of type 'qm9700'",
        "1 devices stand in no rack and",
    ]


def test_netbox_lists_as_csv() -> None:
    part = imported("netbox", "netbox-devices.csv", node_types={"Disk 2U": "l40s-8"}).part
    facility = facility_file.parse(f"name: f\n{facility_file.written(part)}", "part.yaml")
    assert {n.name: n.type for n in facility.nodes.values()} == {
        "dgx-01": "dgx-h100",
        "dgx-02": "dgx-h100",
        "store-1": "l40s-8",
    }


def test_a_list_of_racks_says_in_which_unit_they_bear() -> None:
    text = "name,u_height,max_weight,weight_unit\nA1,42,1000,LB\nA2,42,900,\nA3,42,,kg\n"
    racks = importers.FORMATS["netbox"](text, "file", Open()).part.sites["site"].racks
    assert {name: getattr(rack, "weight_kg", "") for name, rack in racks.items()} == {
        "A1": 453.6,
        "A2": 900.0,
        "A3": None,
    }


def test_racks_of_one_name_are_told_apart() -> None:
    text = "name,site,u_height\nA1,fra,42\nA1,ams,48\n"
    part = importers.FORMATS["netbox"](text, "file", Open()).part
    facility = facility_file.parse(f"name: f\n{facility_file.written(part)}", "part.yaml")
    assert {name: rack.height_u for name, rack in facility.racks.items()} == {"fra-A1": 42, "ams-A1": 48}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no JSON, and no CSV with columns for name and rack or height"),
        ("{}", "has no rack, and no device in one"),
        ("[3]", "expected racks and devices as objects, found int"),
        ('[{"name": null, "u_height": 42}]', "a rack or device has no name"),
        ('[{"name": "r", "u_height": 1e999}]', "Number out of range"),
        ("name;rack\n", "no JSON, and no CSV"),
    ],
)
def test_netbox_that_is_none(text: str, told: str) -> None:
    assert told in refused("netbox", text)


# --- nvidia-smi topo ---


def test_a_host_with_nvlink_and_a_nic_for_each_gpu() -> None:
    matrix = nvidia_topo.matrix((DATA / "topo-hgx.txt").read_text(), "t")
    assert matrix.scale_up == (tuple(range(8)),)
    assert matrix.pcie == tuple((gpu,) for gpu in range(8))
    assert matrix.numa == (0, 0, 0, 0, 1, 1, 1, 1)
    # Ten NICs, two of them for storage: the rails are those of the others.
    assert matrix.rails == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_host_with_pcie_alone() -> None:
    matrix = nvidia_topo.matrix((DATA / "topo-pcie.txt").read_text(), "t")
    assert matrix.scale_up == ((0,), (1,), (2, 3))
    assert matrix.pcie == ((0, 1), (2,), (3,))
    assert matrix.numa == (0, 0, 0, -1)
    assert matrix.rails == (-1, -1, -1, -1)


def test_the_layout_is_a_node_type_for_a_file_to_use() -> None:
    part = imported("nvidia-topo", "topo-hgx.txt", node_types={"": "dgx-h100"}).part
    text = f"name: f\nsites: {{s: {{racks: {{r: {{nodes: {{n: dgx-h100-topo}}}}}}}}}}\n{facility_file.written(part)}"
    assert facility_file.parse(text, "f.yaml").nodes["n"].gpus[5] == Gpu(5, "n", pcie_root=5, numa=1, rail=5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no line begins with GPU0"),
        ("\tGPU0\tGPU1\nGPU0\tX\n", "file:2: GPU0 says something else"),
        ("\tGPU0\tGPU1\nGPU0\tX\tYES\n", "file:2: GPU0 says something else"),
        ("\tGPU0\tGPU1\nGPU0\tX\tSYS\n", "each with its line; ['GPU1'] have none"),
        ("\tGPU0\nGPU0\tX\t0-1\t0\nGPU1\tX\n", ""),
        ("\tGPU0\tGPU0\n", "each once"),
        ("\tGPU0\tGPU2\nGPU0\tX\tSYS\nGPU2\tSYS\tX\n", "GPUs must be counted from 0"),
    ],
)
def test_topo_that_is_none(text: str, told: str) -> None:
    if told:
        assert told in refused("nvidia-topo", text)
    else:
        importers.FORMATS["nvidia-topo"](text, "file", Open())


# --- lldp ---


def test_lldp_gives_a_hosts_cables_with_their_rates() -> None:
    facility = alone("lldp", "lldp.json", "dgx-h100", node="dgx-01", interfaces="ens*", gbit_per_s=100.0)
    assert [(link.lower, link.upper, link.count, link.rate) for link in facility.links] == [
        ("dgx-01", "leaf-1", 2, 400e9 / 8),
        ("dgx-01", "leaf-2", 1, 100e9 / 8),
    ]


def test_lldp_in_the_verbose_form_and_a_neighbour_without_a_name() -> None:
    part = imported("lldp", "lldp-json0.json", node="n").part
    assert list(part.switches) == ["leaf-1", "1c:34:da:00:00:02"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "truncated"),
        ("[]", "no interface like '*' has a neighbour with a name"),
        ('{"lldp": {}}', "no interface like '*' has a neighbour with a name"),
        ('{"lldp": {"interface": [7]}}', "an interface must be an object, not int"),
        ('{"lldp": {"interface": {"e": {"chassis": 7, "port": 9}}}}', "no interface"),
    ],
)
def test_lldp_that_is_none(text: str, told: str) -> None:
    assert told in refused("lldp", text)


def test_hosts_with_a_file_each_become_one_part(tmp_path: Path) -> None:
    for name in ("n1", "n2"):
        (tmp_path / f"{name}.json").write_bytes((DATA / "lldp.json").read_bytes())
    left_open = Open(node_types={"": "dgx-h100"}, interfaces="ens*")
    part = importers.read("lldp", [tmp_path / "n1.json", tmp_path / "n2.json"], left_open).part
    facility = facility_file.parse(f"name: f\n{facility_file.written(part)}", "part.yaml")
    assert sorted(facility.nodes) == ["n1", "n2"]
    assert [(link.lower, link.upper, link.count) for link in facility.links] == [
        ("n1", "leaf-1", 2),
        ("n1", "leaf-2", 1),
        ("n2", "leaf-1", 2),
        ("n2", "leaf-2", 1),
    ]


def test_a_line_without_end_is_read_in_no_time() -> None:
    began = time.process_time()
    assert "found 'aaa" in refused("slurm", "a" * 100_000)
    assert time.process_time() - began < 2.0  # quadratic, it would be a minute


def test_a_rack_of_thousands_of_devices_is_read_in_no_time() -> None:
    devices = [{"name": f"d{n}", "rack": "r", "device_type": {"slug": "l40s-8"}} for n in range(20_000)]
    places = [{"name": f"r{n}", "location": f"l{n}"} for n in range(20_000)]
    began = time.process_time()
    part = importers.FORMATS["netbox"](json.dumps([*devices, *places]), "n.json", Open()).part
    assert time.process_time() - began < 2.0  # quadratic, it would be ten seconds
    assert len(part.sites["site"].suites) == 20_000
    rack = part.sites["site"].racks["r"]
    assert isinstance(rack, RackEntry)
    assert len(rack.nodes) == 20_000


def test_a_height_beyond_all_numbers_is_none() -> None:
    text = f'[{{"name": "r", "u_height": {"9" * 400}}}]'
    rack = importers.FORMATS["netbox"](text, "n.json", Open()).part.sites["site"].racks["r"]
    assert rack == RackEntry()
