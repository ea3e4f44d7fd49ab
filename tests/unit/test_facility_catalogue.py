"""The catalogue: each figure has a source with a date, and none is beyond belief."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from stoker.planner import catalogue
from stoker.planner.facility_schema import GpuTypeEntry, NodeTypeEntry, RackTypeEntry

ROOT = Path(__file__).resolve().parents[2]
FILE, KNOWN = catalogue.file(), catalogue.load()
ENTRIES: dict[str, GpuTypeEntry | NodeTypeEntry | RackTypeEntry] = {
    **FILE.gpu_types,
    **FILE.node_types,
    **FILE.rack_types,
}
NO_FIGURES = {"source", "source_of", "like", "driver_names", "gpu", "fill"}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_figure_has_a_source_with_a_date(name: str) -> None:
    entry = ENTRIES[name]
    given = {key for key in entry.__struct_fields__ if getattr(entry, key) not in (None, "", {}, [])} - NO_FIGURES
    assert set(entry.source_of) <= given, "a source of a figure that is not there"
    for key in given:
        source = FILE.sources[entry.source_of.get(key, entry.source)]
        assert source.title
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", source.date)


def test_every_source_is_used() -> None:
    used = {s for entry in ENTRIES.values() for s in (entry.source, *entry.source_of.values())}
    assert set(FILE.sources) == used


@pytest.mark.parametrize("name", KNOWN.gpu_types)
def test_gpus_are_plausible(name: str) -> None:
    gpu = KNOWN.gpu_types[name]
    assert 40e9 <= gpu.memory <= 310e9
    assert 300e9 <= gpu.memory_bandwidth <= 10e12
    assert 300 <= gpu.max_power <= 1500
    assert 100e12 <= gpu.flops["bf16"] <= 3e15
    # Each halving of the data type doubles the rate, or more.
    rates = [gpu.flops[kind] for kind in ("bf16", "fp8", "fp4") if kind in gpu.flops]
    assert all(1.9 * slow < fast < 3.1 * slow for slow, fast in pairwise(rates))
    assert gpu.driver_names
    published = FILE.gpu_types[name].memory_gb
    assert 0.98 * published * 1e9 <= gpu.memory <= 1.075 * published * 1e9


@pytest.mark.parametrize("name", KNOWN.node_types)
def test_nodes_are_plausible(name: str) -> None:
    node = KNOWN.node_types[name]
    gpus = node.gpus * KNOWN.gpu_types[node.gpu].max_power
    assert gpus < node.max_power < 3 * gpus
    assert 0 < node.idle_power < node.max_power
    assert 1 <= node.height_u <= 10
    assert node.weight_kg > 0
    assert node.fabric_ports > 0
    assert 20e9 <= node.port_rate <= 110e9


def test_an_nvl72_is_what_it_is_called() -> None:
    rack = KNOWN.rack_types["gb200-nvl72"]
    tray = KNOWN.node_types["gb200-nvl72-tray"]
    assert rack.nodes == {"gb200-nvl72-tray": 18}
    assert rack.nodes["gb200-nvl72-tray"] * tray.gpus == 72
    assert rack.base_power + 18 * tray.max_power == 120_000
    assert rack.reserved_u + 18 * tray.height_u == rack.height_u


def test_the_wheel_holds_the_catalogue() -> None:
    """Hatch packs what is not ignored: `packages` are whole folders, and no rule leaves YAML out."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "services/planner/stoker" in wheel["packages"]
    assert not {"exclude", "only-include"} & set(wheel)
    assert ".yaml" not in (ROOT / ".gitignore").read_text()
    assert len(list((ROOT / "services/planner/stoker/planner/catalogue").glob("*.yaml"))) == 3
