"""What readers of other formats share: what they yield, what they ask, and how they treat names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from stoker.common import yaml_file
from stoker.planner.core.facility.ranges import MOST_NAMES, compressed
from stoker.planner.facility_schema import FacilityFile, LinkEntry, NodeEntry, RackEntry, SiteEntry, SwitchEntry

T = TypeVar("T")

_MOST_TIERS = 8
_STRANGE = re.compile(r"[^A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True)
class Open:
    """What a format does not say.

    `gbit_per_s` is the rate of each cable. `oversubscription` is rate down to rate up at each switch of a tree.
    `node_types` names the node type by what the format calls it; "" is that of all nodes. `node` is the host that a
    file about one host is from. `interfaces` is a pattern (*, ?) of the interfaces that count.
    """

    gbit_per_s: float = 400.0
    oversubscription: float = 1.0
    node_types: Mapping[str, str] = field(default_factory=dict)
    node: str = ""
    interfaces: str = "*"


@dataclass(frozen=True, slots=True)
class Imported:
    """A part of a facility file, and what its reader of the other format wants to be known."""

    part: FacilityFile
    notes: tuple[str, ...] = ()


def decoded(text: str, source: str, kind: type[T]) -> T:
    """A value of that type from JSON. Raises StokerError (BAD_FILE) that names the place."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise yaml_file.bad(f"{source}: {str(error)[:300]}") from error


def clean(name: str, source: str) -> str:
    """A name with what names may not hold put as hyphens. Raises where nothing is left."""
    cleaned = _STRANGE.sub("-", name).strip("-._:")[:127]
    if not cleaned:
        raise yaml_file.bad(f"{source}: {name[:60]!r} cannot be made a name; names have letters and digits")
    return cleaned


def bounded(count: int, source: str) -> None:
    """Refuse more things than a facility may have."""
    if count > MOST_NAMES:
        raise yaml_file.bad(f"{source}: has more than {MOST_NAMES} entries; that is no facility")


def tree(
    nodes_of: Mapping[str, Iterable[str]], switches_of: Mapping[str, Iterable[str]], source: str, left_open: Open
) -> tuple[dict[str, SwitchEntry], list[LinkEntry]]:
    """Switches and cables of a tree: leaves by their nodes, others by the switches below them.

    As many cables lead up from a switch as nodes are below it, divided by the oversubscription: what these formats
    do not say. Raises where switches are above themselves.
    """
    tiers: dict[str, int] = {}
    below: dict[str, int] = {}
    waiting = list(dict.fromkeys([*nodes_of, *switches_of]))
    while waiting:
        ready = [s for s in waiting if all(child in tiers for child in switches_of.get(s, ()))]
        if not ready or len(set(tiers.values())) > _MOST_TIERS:
            raise yaml_file.bad(
                f"{source}: {waiting[0]} is above itself, above a switch that is not described, or "
                f"more than {_MOST_TIERS} tiers high"
            )
        for switch in ready:
            children = list(switches_of.get(switch, ()))
            tiers[switch] = max((tiers[child] + 1 for child in children), default=0)
            below[switch] = len(set(nodes_of.get(switch, ()))) + sum(below[child] for child in children)
        waiting = [s for s in waiting if s not in tiers]
    up = {s: max(1, math.ceil(count / left_open.oversubscription)) for s, count in below.items()}
    ports = {s: len(set(nodes_of.get(s, ()))) + sum(up[child] for child in switches_of.get(s, ())) for s in tiers}
    has_parent = {child for children in switches_of.values() for child in children}
    switches = {
        name: SwitchEntry(tier=tier, radix=max(64, ports[name] + (up[name] if name in has_parent else 0)))
        for name, tier in tiers.items()
    }
    links = [
        LinkEntry(lower=nodes, upper=switch, gbit_per_s=left_open.gbit_per_s)
        for switch, names in nodes_of.items()
        if (nodes := ",".join(compressed(names)))
    ]
    links += [
        LinkEntry(lower=child, upper=switch, gbit_per_s=left_open.gbit_per_s, count=min(up[child], 10_000))
        for switch, children in switches_of.items()
        for child in dict.fromkeys(children)
    ]
    return switches, links


def sites(nodes: Iterable[str], left_open: Open) -> dict[str, SiteEntry]:
    """A site with every node in a rack of its own, where the node type is given; none where the including file is to
    say where the nodes stand."""
    kind = left_open.node_types.get("")
    if not kind:
        return {}
    racks: dict[str, str | RackEntry] = {}
    for names in compressed(nodes):
        entry: dict[str, str | NodeEntry] = {names: kind}
        racks[f"rack-{names}"] = RackEntry(height_u=100, nodes=entry)
    return {"imported": SiteEntry(racks=racks)}


def joined(parts: Sequence[Imported]) -> Imported:
    """Parts put together: mappings key by key, lists one behind the other; of two single values the first."""
    whole: Any = {}
    for each in parts:
        whole = _together(whole, msgspec.to_builtins(each.part))
    notes = dict.fromkeys(note for each in parts for note in each.notes)
    return Imported(msgspec.convert(whole, FacilityFile), tuple(notes))


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        added = {key: _together(one[key], value) if key in one else value for key, value in other.items()}
        return {**one, **added}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else one


def either(value: Any) -> list[Any]:
    """A list of what is a list, or one of it."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
