"""`lldpctl -f json` (or json0) of one host: which switch each of its interfaces is cabled to."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from stoker.common import yaml_file
from stoker.planner.facility_schema import FacilityFile, LinkEntry, SwitchEntry
from stoker.planner.importers.part import Imported, Open, bounded, clean, decoded, either, sites

_RATE = re.compile(r"(\d{1,5})\s*G", re.IGNORECASE)


def parse(text: str, source: str, left_open: Open) -> Imported:
    """Switches, and the host's cables to them. Raises StokerError (BAD_FILE)."""
    whole = decoded(text, source, Any)
    node = clean(left_open.node or PurePath(source).stem, source)
    cables: Counter[tuple[str, float]] = Counter()
    for interface, told in _interfaces(whole, source):
        if not fnmatch.fnmatchcase(interface, left_open.interfaces):
            continue
        switch = _switch(told)
        if switch:
            cables[clean(switch, source), _rate(told) or left_open.gbit_per_s] += 1
    bounded(len(cables), source)
    if not cables:
        raise yaml_file.bad(f"{source}: no interface like {left_open.interfaces!r} has a neighbour with a name")
    part = FacilityFile(
        sites=sites([node], left_open),
        switches={name: SwitchEntry(radix=64) for name, _ in cables},
        links=[
            LinkEntry(lower=node, upper=name, gbit_per_s=rate, count=count) for (name, rate), count in cables.items()
        ],
    )
    return Imported(part, (f"the cables of {node}; LLDP tells no number of ports: switches have radix 64",))


def _interfaces(whole: Any, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Interfaces by name. In json the name is a key, in json0 a value; either may stand in a list."""
    for lldp in either(whole.get("lldp") if isinstance(whole, dict) else None):
        for interface in either(lldp.get("interface") if isinstance(lldp, dict) else None):
            if not isinstance(interface, dict):
                raise yaml_file.bad(f"{source}: an interface must be an object, not {type(interface).__name__}")
            if isinstance(interface.get("name"), str):
                yield interface["name"], interface
            else:
                yield from ((name, told) for name, told in interface.items() if isinstance(told, dict))


def _switch(told: dict[str, Any]) -> str:
    """The neighbour's name, or its id where it has none."""
    for chassis in either(told.get("chassis")):
        if not isinstance(chassis, dict):
            continue
        name = _text(chassis.get("name"))
        if name:
            return name
        named = [str(key) for key, value in chassis.items() if isinstance(value, dict) and key != "id"]
        if named and "id" not in chassis:
            return named[0]
        return _text(chassis.get("id"))
    return ""


def _rate(told: dict[str, Any]) -> float:
    """The negotiated rate in Gbit/s, 0 where it is not told."""
    for port in either(told.get("port")):
        for negotiation in either(port.get("auto-negotiation") if isinstance(port, dict) else None):
            current = _text(negotiation.get("current")) if isinstance(negotiation, dict) else ""
            match = _RATE.match(current)
            if match:
                return float(match[1])
    return 0.0


def _text(value: Any) -> str:
    """A text, or the first one that stands as `value` in objects and lists around it."""
    for each in either(value):
        found = each.get("value") if isinstance(each, dict) else each
        if isinstance(found, str) and found.strip():
            return found.strip()
    return ""
