"""Types of a facility file, resolved: what is `like` another filled in from it, every name checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import TypeVar

import msgspec

from stoker.planner.core.facility.ranges import BadRange, expand
from stoker.planner.core.facility.values import GpuType, NodeType, RackType
from stoker.planner.core.units import Bytes, BytesPerSecond, Watts, link_rate, watts
from stoker.planner.facility_schema import (
    FacilityFile,
    GpuTypeEntry,
    NodeEntry,
    NodeTypeEntry,
    RackEntry,
    RackTypeEntry,
)

S = TypeVar("S", bound=msgspec.Struct)

Wrong = Callable[[str, str], None]
"""Told the path in the file, "node_types.x.gpu", and what is wrong there."""

_LONGEST_LIKENESS = 10
_MOST_HINTED = 500
_MOST_IN_A_RACK = 100
"""No rack is higher than so many U."""
_IDLE_SHARE = 0.3
"""Of the most power, drawn with all GPUs idle, where nobody has measured it."""


class Types:
    """The catalogue's and the file's types; the file's hold before the catalogue's of the same name."""

    def __init__(self, file: FacilityFile, catalogue: FacilityFile, wrong: Wrong) -> None:
        self._wrong = wrong
        self._own = file
        self.gpus = {name: _gpu(name, entry) for name, entry in {**catalogue.gpu_types, **file.gpu_types}.items()}
        self._node_entries = {**catalogue.node_types, **file.node_types}
        self._rack_entries = {**catalogue.rack_types, **file.rack_types}
        self.entries: dict[str, NodeTypeEntry] = {}
        self.nodes: dict[str, NodeType] = {}
        for name in self._node_entries:
            entry = self._resolved(name)
            if entry is not None and self._sound(name, entry):
                self.entries[name] = entry
                self.nodes[name] = _node(name, entry)
        self.racks = {name: self._rack(name, entry) for name, entry in self._rack_entries.items()}

    def wrong_name(self, path: str, what: str, name: str, known: Iterable[str]) -> None:
        """Tell that there is no `what` of that name, and which one may be meant."""
        self._wrong(path, f"no such {what} as {name!r}; {hint(name, known)}")

    def rack_settings(self, entry: str | RackEntry, path: str) -> RackEntry:
        """A rack with what its type says filled in."""
        if isinstance(entry, str):
            entry = RackEntry(type=entry)
        if not entry.type:
            return entry
        base = self._rack_entries.get(entry.type)
        if base is None:
            self.wrong_name(path, "rack type", entry.type, self._rack_entries)
            return entry
        return filled(entry, base)

    def known_node_type(self, name: str, path: str) -> bool:
        """Whether there is that node type, without faults of its own; where there is none, that is told."""
        if name not in self._node_entries:
            self.wrong_name(path, "node type", name, self._node_entries)
        return name in self.nodes

    def _resolved(self, name: str) -> NodeTypeEntry | None:
        entry, seen = self._node_entries[name], [name]
        while entry.like:
            base = entry.like
            if base in seen or len(seen) > _LONGEST_LIKENESS:
                self._wrong(f"node_types.{name}.like", f"{' is like '.join([*seen, base][:5])}: that never ends")
                return None
            if base not in self._node_entries:
                if len(seen) == 1:
                    self.wrong_name(f"node_types.{name}.like", "node type", base, self._node_entries)
                return None
            seen.append(base)
            entry = filled(msgspec.structs.replace(entry, like=""), self._node_entries[base])
        return entry

    def _sound(self, name: str, entry: NodeTypeEntry) -> bool:
        path = f"node_types.{name}"
        missing = [key for key in ("height_u", "weight_kg", "max_kw") if getattr(entry, key) is None]
        for key in missing:
            self._wrong(path, f"{key} is missing; it must be given, or taken from another type by `like`")
        if entry.gpu and entry.gpu not in self.gpus:
            self.wrong_name(f"{path}.gpu", "GPU type", entry.gpu, self.gpus)
            return False
        if bool(entry.gpu) != bool(entry.gpus):
            self._wrong(path, "give both gpu and gpus, or none of them for a host without GPUs")
            return False
        if not missing and (entry.idle_kw or 0) > (entry.max_kw or 0):
            self._wrong(f"{path}.idle_kw", f"{entry.idle_kw:g} is more than max_kw, {entry.max_kw:g}")
        return not missing and self._layout_sound(path, entry)

    def _layout_sound(self, path: str, entry: NodeTypeEntry) -> bool:
        count, good = entry.gpus or 0, True
        for key in ("numa", "pcie_roots", "rails"):
            given = getattr(entry, key)
            if given is not None and len(given) != count:
                self._wrong(f"{path}.{key}", f"has {len(given)} values for {count} GPUs; give one for each")
                good = False
        if isinstance(entry.scale_up, list) and sorted(chain(*entry.scale_up)) != list(range(count)):
            self._wrong(f"{path}.scale_up", f"its groups must hold each GPU from 0 to {count - 1} once")
            good = False
        return good

    def _rack(self, name: str, entry: RackTypeEntry) -> RackType:
        path = f"rack_types.{name}"
        if entry.fill:
            self.known_node_type(entry.fill, f"{path}.fill")
        nodes: dict[str, int] = {}
        for pattern, node in entry.nodes.items():
            kind = node_entry(node).type
            try:
                count = len(expand(pattern.replace("$", ""), _MOST_IN_A_RACK))
            except BadRange as error:
                self._wrong(f"{path}.nodes.{pattern}", str(error))
                continue
            if self.known_node_type(kind, f"{path}.nodes.{pattern}"):
                nodes[kind] = nodes.get(kind, 0) + count
        return RackType(
            name,
            height_u=entry.height_u or 42,
            reserved_u=entry.reserved_u or 0,
            weight_kg=entry.weight_kg,
            cooling=None if entry.cooling_kw is None else watts(entry.cooling_kw),
            base_power=watts(entry.base_kw or 0),
            nodes=nodes,
            fill=entry.fill or "",
        )


def filled(entry: S, base: msgspec.Struct) -> S:
    """An entry with what it does not say taken from another one; mappings are put together."""
    changes: dict[str, object] = {}
    known = set(base.__struct_fields__)
    for key in entry.__struct_fields__:
        if key in ("type", "like", "source", "source_of", "racks") or key not in known:
            continue
        mine, theirs = getattr(entry, key), getattr(base, key)
        if mine is None or mine == {}:
            changes[key] = theirs
        elif key == "nodes" and isinstance(theirs, Mapping):
            changes[key] = {**theirs, **mine}
    if "like" in entry.__struct_fields__:
        changes["like"] = getattr(base, "like", "")
    return msgspec.structs.replace(entry, **changes)


def node_entry(entry: str | NodeEntry) -> NodeEntry:
    """The long form of a node."""
    return NodeEntry(type=entry) if isinstance(entry, str) else entry


def hint(name: str, known: Iterable[str]) -> str:
    """What may be meant by a name that is not known."""
    names = sorted(islice(known, _MOST_HINTED))
    near = difflib.get_close_matches(name[:80], names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(names[:20])}" if names else "there is none yet"


def _gpu(name: str, entry: GpuTypeEntry) -> GpuType:
    return GpuType(
        name,
        memory=Bytes(round(entry.memory_gb * 1e9 if entry.memory_mib is None else entry.memory_mib * 2**20)),
        memory_bandwidth=BytesPerSecond(round(entry.memory_gb_per_s * 1e9)),
        flops={kind: rate * 1e12 for kind, rate in entry.tflops.items()},
        max_power=Watts(entry.max_w),
        scale_up_bandwidth=BytesPerSecond(round(entry.scale_up_gb_per_s * 1e9)),
        pcie_bandwidth=BytesPerSecond(round(entry.pcie_gb_per_s * 1e9)),
        driver_names=tuple(entry.driver_names),
    )


def _node(name: str, entry: NodeTypeEntry) -> NodeType:
    most = entry.max_kw or 0.0
    return NodeType(
        name,
        height_u=entry.height_u or 1,
        weight_kg=entry.weight_kg or 0.0,
        max_power=watts(most),
        idle_power=watts(most * _IDLE_SHARE if entry.idle_kw is None else entry.idle_kw),
        gpu=entry.gpu or "",
        gpus=entry.gpus or 0,
        fabric_ports=entry.fabric_ports or 0,
        port_rate=link_rate(entry.port_gbit_per_s or 0),
        cost_per_hour=entry.cost_per_hour or 0.0,
    )
