"""`nvidia-smi topo -m`: which GPUs of a host have NVLink between them, and which PCIe switch, NUMA node and NIC each
has near.

Between two devices the matrix says NV# (NVLink), PIX or PXB (one or more PCIe switches: the same PCIe root), PHB,
NODE or SYS (through the CPU). Where NVLink hides the PCIe path between two GPUs, a NIC below both tells it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stoker.common import yaml_file
from stoker.planner.facility_schema import FacilityFile, NodeTypeEntry
from stoker.planner.importers.part import Imported, Open, clean

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(GPU|NIC)(\d{1,4})", re.ASCII)
_KINDS = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS", re.ASCII)
_NUMA = re.compile(r"\d{1,4}", re.ASCII)
_SAME_ROOT = ("PIX", "PXB")
_MOST_DEVICES = 256


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a host's matrix says, of GPUs in their order: groups of indices, and one value for each GPU."""

    gpus: int
    scale_up: tuple[tuple[int, ...], ...]
    pcie: tuple[tuple[int, ...], ...]
    numa: tuple[int, ...]
    rails: tuple[int, ...]


def parse(text: str, source: str, left_open: Open) -> Imported:
    """A node type with the layout of the host's GPUs. Raises StokerError (BAD_FILE)."""
    read = matrix(text, source)
    base = left_open.node_types.get("", "")
    name = clean(left_open.node or base or "imported", source)
    name = f"{name}-topo" if name == base else name
    root_of = {gpu: number for number, group in enumerate(read.pcie) for gpu in group}
    entry = NodeTypeEntry(
        like=base,
        gpus=read.gpus,
        scale_up=_written(read),
        numa=list(read.numa),
        pcie_roots=[root_of[gpu] for gpu in range(read.gpus)],
        rails=list(read.rails) if any(rail >= 0 for rail in read.rails) else None,
    )
    note = f"node type {name} has no height, power and GPU yet: give it `like`, or say --node-type TYPE"
    return Imported(FacilityFile(node_types={name: entry}), () if base else (note,))


def _written(read: Matrix) -> Literal["node", "rack", "none"] | list[list[int]]:
    if len(read.scale_up) == 1 and read.gpus > 1:
        return "node"
    if all(len(group) == 1 for group in read.scale_up):
        return "none"
    return [list(group) for group in read.scale_up]


def matrix(text: str, source: str) -> Matrix:
    """Read the matrix. Raises StokerError (BAD_FILE) that names the line."""
    lines = [(number, _ESCAPES.sub("", line).split()) for number, line in enumerate(text.splitlines(), 1)]
    head = next(((number, words) for number, words in lines if words and words[0] in ("GPU0", "NIC0")), None)
    if head is None:
        raise yaml_file.bad(f"{source}: no line begins with GPU0; it must be what `nvidia-smi topo -m` writes")
    columns = [word for word in head[1] if _DEVICE.fullmatch(word)]
    if len(columns) > _MOST_DEVICES or len(set(columns)) != len(columns):
        raise yaml_file.bad(f"{source}:{head[0]}: a host has at most {_MOST_DEVICES} devices, each once")
    kinds: dict[tuple[str, str], str] = {}
    numa: dict[str, int] = {}
    for number, words in lines:
        if number <= head[0] or not words or not _DEVICE.fullmatch(words[0]):
            continue
        row, cells = words[0], words[1 : 1 + len(columns)]
        if row not in columns or row in numa:
            raise yaml_file.bad(f"{source}:{number}: {row} is no column above, or has a line already")
        if len(cells) != len(columns) or not all(map(_KINDS.fullmatch, cells)):
            raise yaml_file.bad(
                f"{source}:{number}: {row} says something else than X, NV#, PIX, PXB, PHB, NODE or SYS"
            )
        kinds |= {(row, column): cell for column, cell in zip(columns, cells, strict=True)}
        rest = words[1 + len(columns) :]
        numa[row] = int(rest[1]) if len(rest) > 1 and _NUMA.fullmatch(rest[1]) else -1
        if len(numa) == len(columns):
            break
    gpus = sorted((c for c in columns if c.startswith("GPU")), key=_number)
    missing = [gpu for gpu in gpus if gpu not in numa]
    if missing or [_number(gpu) for gpu in gpus] != list(range(len(gpus))):
        raise yaml_file.bad(f"{source}: GPUs must be counted from 0, each with its line; {missing[:3]} have none")
    linked = _joined(gpus, [pair for pair, kind in kinds.items() if kind.startswith("NV")])
    near = _joined(columns, [pair for pair, kind in kinds.items() if kind in _SAME_ROOT])
    return Matrix(
        gpus=len(gpus),
        scale_up=_indices(linked),
        pcie=_indices(near),
        numa=tuple(numa[gpu] for gpu in gpus),
        rails=_rails(gpus, columns, kinds),
    )


def _number(device: str) -> int:
    return int(device[3:])


def _joined(devices: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Devices put together where a pair joins them, directly or through others."""
    group_of = {device: {device} for device in devices}
    for one, other in pairs:
        if one in group_of and other in group_of and group_of[one] is not group_of[other]:
            group_of[one] |= group_of[other]
            for device in group_of[other]:
                group_of[device] = group_of[one]
    return list({id(group): group for group in group_of.values()}.values())


def _indices(groups: Iterable[set[str]]) -> tuple[tuple[int, ...], ...]:
    found = (sorted(_number(d) for d in group if d.startswith("GPU")) for group in groups)
    return tuple(sorted(tuple(group) for group in found if group))


def _rails(gpus: list[str], columns: list[str], kinds: dict[tuple[str, str], str]) -> tuple[int, ...]:
    """The rail of each GPU: the rank of its nearest NIC among those that are nearest to some GPU; -1 for all where
    one GPU has none on its PCIe root, or two share one."""
    nics = sorted((c for c in columns if c.startswith("NIC")), key=_number)
    nearest = []
    for gpu in gpus:
        by_kind = [nic for kind in _SAME_ROOT for nic in nics if kinds.get((gpu, nic)) == kind]
        nearest.append(next((nic for nic in by_kind if nic not in nearest), ""))
    if "" in nearest:
        return (-1,) * len(gpus)
    ranks = {nic: rank for rank, nic in enumerate(sorted(nearest, key=_number))}
    return tuple(ranks[nic] for nic in nearest)
