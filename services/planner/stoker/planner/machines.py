"""Machines by the name of a GPU or node type, from a catalogue or a facility."""

from __future__ import annotations

import difflib
from collections import Counter

from stoker.common.errors import InvalidRequest
from stoker.planner import catalogue
from stoker.planner.core.facility.values import Facility, NodeType
from stoker.planner.core.sizing.machine import Machine


def machine_of(facility: Facility, name: str, field: str = "--gpu") -> Machine:
    """The machine of a node type, or of the largest node type that has such a GPU: of those that stand in the
    facility, where any does, and of several, of one that is named after it.

    Raises InvalidRequest naming what there is, and `field` as what is wrong.
    """
    types = facility.node_types
    if name in types and types[name].gpu:
        return _machine(facility, types[name])
    hosts = [each for each in types.values() if each.gpu == name]
    if not hosts:
        known = sorted({each for name, host in types.items() if host.gpu for each in (name, host.gpu)})
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidRequest.field(field, f"no GPU or node type {name!r}; {hint}there are {', '.join(known)}")
    there = {node.type for node in facility.nodes.values()}
    hosts = [host for host in hosts if host.name in there] or hosts
    return _machine(facility, min(hosts, key=lambda host: (-host.gpus, not host.name.startswith(name), host.name)))


def _machine(facility: Facility, node: NodeType) -> Machine:
    gpu = facility.gpu_types[node.gpu]
    return Machine(gpu, node, _domain(facility, node) if gpu.scale_up_bandwidth else 1)


def _domain(facility: Facility, node: NodeType) -> int:
    """GPUs that one NVLink domain has: those of a host, or of all hosts of a rack whose trays form one."""
    standing = [host for host in facility.nodes.values() if host.type == node.name]
    if standing:
        return max(
            Counter(gpu.scale_up for host in standing for gpu in host.gpus if gpu.scale_up).values(), default=1
        )
    entry = catalogue.file().node_types.get(node.name)
    if entry is None or entry.scale_up != "rack":
        return node.gpus
    return max((rack.nodes.get(node.name, 0) * node.gpus for rack in facility.rack_types.values()), default=node.gpus)
