"""Topograph's graph (`engine: graph`): instances with the switches above them, nearest first, and NVLink domains."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec

from stoker.common import yaml_file
from stoker.planner.core.facility.ranges import compressed
from stoker.planner.facility_schema import FacilityFile
from stoker.planner.importers.part import Imported, Open, bounded, clean, decoded, sites, tree

_DOMAIN_LABELS = (
    "network.topology.nvidia.com/accelerator",
    "accelerated.topology.nvidia.com/level-0",
    "nvidia.com/gpu.clique",
)


class _Instance(msgspec.Struct):
    id: str
    network_layers: list[str] = []
    attributes: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class _Graph(msgspec.Struct):
    instances: list[_Instance]


def parse(text: str, source: str, left_open: Open) -> Imported:
    """Switches, cables and NVLink domains. Raises StokerError (BAD_FILE)."""
    graph = decoded(text, source, _Graph)
    bounded(len(graph.instances), source)
    nodes_of: defaultdict[str, list[str]] = defaultdict(list)
    switches_of: defaultdict[str, dict[str, None]] = defaultdict(dict)
    domains: defaultdict[str, list[str]] = defaultdict(list)
    parent: dict[str, str] = {}
    for instance in graph.instances:
        node = clean(instance.id, source)
        layers = [clean(layer, source) for layer in instance.network_layers if layer]
        if layers:
            nodes_of[layers[0]].append(node)
        for lower, upper in pairwise(layers):
            if parent.setdefault(lower, upper) != upper:
                raise yaml_file.bad(f"{source}: {lower} is below {parent[lower]} and below {upper}; that is no tree")
            switches_of[upper][lower] = None
        domain = _domain(instance)
        if domain:
            domains[clean(domain, source)].append(node)
    switches, links = tree(nodes_of, switches_of, source, left_open)
    names = [clean(instance.id, source) for instance in graph.instances]
    part = FacilityFile(
        sites=sites(names, left_open),
        switches=dict(switches),
        links=links,
        scale_up_domains={domain: ",".join(compressed(nodes)) for domain, nodes in domains.items()},
    )
    return Imported(part)


def _domain(instance: _Instance) -> str:
    told, labels = instance.attributes or {}, instance.labels or {}
    return told.get("nvlink") or next((labels[key] for key in _DOMAIN_LABELS if labels.get(key)), "")
