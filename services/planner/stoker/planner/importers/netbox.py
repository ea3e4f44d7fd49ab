"""NetBox: racks and devices, as its REST API answers (JSON) or as its lists are exported (CSV)."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stoker.common import yaml_file
from stoker.planner import catalogue
from stoker.planner.facility_schema import FacilityFile, NodeEntry, RackEntry, SiteEntry, SuiteEntry
from stoker.planner.importers.part import Imported, Open, bounded, clean, decoded, either

_GONE = ("decommissioning", "inventory", "offline")
_KG = {"kg": 1.0, "g": 0.001, "lb": 0.45359237, "oz": 0.028349523}


@dataclass(frozen=True, slots=True)
class _Row:
    """A rack or a device; "" and None where nothing is said. A device has a `kind`."""

    name: str
    site: str
    location: str
    rack: str = ""
    kind: str = ""
    status: str = ""
    height_u: int | None = None
    position: int = 0
    most_kg: float | None = None


def parse(text: str, source: str, left_open: Open) -> Imported:
    """Sites, racks, and those devices that are nodes of a known type; what else stands there is reserved U.

    A device is a node where its type (slug or model) is one of the catalogue's, or one that `left_open.node_types`
    names. Raises StokerError (BAD_FILE).
    """
    rows = list(_json(text, source) if text.lstrip()[:1] in ("{", "[") else _csv(text, source))
    bounded(len(rows), source)
    racks: dict[tuple[str, str, str], RackEntry] = {}
    notes: Counter[str] = Counter()
    homeless = 0
    for row in rows:
        if not row.kind:
            racks[row.site, row.location, row.name] = RackEntry(height_u=row.height_u, weight_kg=row.most_kg)
    # A device may be told with another location than its rack's own.
    by_name = {(key[0], key[2]): key for key in reversed(racks)}
    known = {name.lower(): name for name in catalogue.load().node_types}
    known |= {name.lower(): kind for name, kind in left_open.node_types.items() if name}
    for row in rows:
        if not row.kind or row.status in _GONE:
            continue
        if not row.rack:
            homeless += 1
            continue
        key = by_name.setdefault((row.site, row.rack), (row.site, row.location, row.rack))
        rack = racks.setdefault(key, RackEntry())
        kind = known.get(row.kind.lower()) or known.get(clean(row.kind, source).lower())
        if kind is None:
            notes[row.kind] += 1
            if row.height_u:
                rack.reserved_u = (rack.reserved_u or 0) + row.height_u
        else:
            rack.nodes[row.name] = NodeEntry(type=kind, bottom_u=row.position)
    if not racks:
        raise yaml_file.bad(f"{source}: has no rack, and no device in one")
    said = [
        f"{count} devices of type {kind!r} are no known node type and count as reserved U; --node-type '{kind}=TYPE' "
        "makes nodes of them"
        for kind, count in sorted(notes.items())
    ]
    if homeless:
        said.append(f"{homeless} devices stand in no rack and are left out")
    return Imported(FacilityFile(sites=_sites(racks)), tuple(said))


def _sites(racks: dict[tuple[str, str, str], RackEntry]) -> dict[str, SiteEntry]:
    """Racks in their sites; a location is a suite. A rack's name that several have is told with site and location."""
    times = Counter(name for _, _, name in racks)
    sites: dict[str, SiteEntry] = {}
    by_place: defaultdict[tuple[str, str], dict[str, str | RackEntry]] = defaultdict(dict)
    for (site, location, name), entry in racks.items():
        unique = name if times[name] == 1 else "-".join(part for part in (site, location, name) if part)
        by_place[site, location][unique] = entry
    for (site, location), entries in by_place.items():
        at = sites.setdefault(site, SiteEntry())
        if location:
            at.suites[location] = SuiteEntry(racks=entries)
        else:
            at.racks |= entries
    return sites


def _json(text: str, source: str) -> Iterator[_Row]:
    """An answer of the API (its `results`), a list, or an object with lists of `racks` and `devices`."""
    whole = decoded(text, source, Any)
    if isinstance(whole, dict):
        lists = [whole.get(key) for key in ("results", "racks", "devices")]
        items = [item for found in lists for item in either(found)]
    else:
        items = either(whole)
    for item in items:
        if not isinstance(item, dict):
            raise yaml_file.bad(f"{source}: expected racks and devices as objects, found {type(item).__name__}")
        kind = item.get("device_type")
        nested = kind if isinstance(kind, dict) else {}
        height = nested.get("u_height", item.get("u_height"))
        yield _Row(
            name=_name(item.get("name") or item.get("display"), source),
            site=_name(_word(item.get("site")) or "site", source),
            location=_optional(_word(item.get("location")), source),
            rack=_optional(_word(item.get("rack")), source),
            kind=str(nested.get("slug") or nested.get("model") or _word(kind)),
            status=_word(item.get("status")).lower(),
            height_u=_whole(height),
            position=_whole(item.get("position")) or 0,
            most_kg=_kg(item.get("max_weight"), _word(item.get("weight_unit"))),
        )


def _csv(text: str, source: str) -> Iterator[_Row]:
    """An exported list; its columns are named as NetBox's own import names them, or as its pages do."""
    try:
        reader = csv.DictReader(io.StringIO(text))
        heads = {_head(name): name for name in reader.fieldnames or ()}
        if "name" not in heads or not {"rack", "u_height", "height"} & set(heads):
            raise yaml_file.bad(f"{source}: no JSON, and no CSV with columns for name and rack or height")
        for line in reader:
            row = {key: (line.get(name) or "").strip() for key, name in heads.items()}
            if not row["name"]:
                continue
            kind = row.get("device_type") or row.get("type", "") if "rack" in heads else ""
            yield _Row(
                name=_name(row["name"], source),
                site=_name(row.get("site") or "site", source),
                location=_optional(row.get("location", ""), source),
                rack=_optional(row.get("rack", ""), source),
                kind=kind or ("unknown" if "rack" in heads else ""),
                status=row.get("status", "").lower(),
                height_u=_whole(row.get("u_height") or row.get("height")),
                position=_whole(row.get("position")) or 0,
                most_kg=_kg(row.get("max_weight"), row.get("weight_unit", "").lower()),
            )
    except csv.Error as error:
        raise yaml_file.bad(f"{source}: no valid CSV: {error}") from error


def _head(name: str | None) -> str:
    return (name or "").strip().lower().replace(" ", "_")


def _word(value: Any) -> str:
    """A text, or what stands for it in a nested object."""
    if isinstance(value, dict):
        value = value.get("name") or value.get("value") or value.get("slug") or value.get("display")
    return value if isinstance(value, str) else ""


def _name(value: Any, source: str) -> str:
    if not isinstance(value, str) or not value:
        raise yaml_file.bad(f"{source}: a rack or device has no name; give it one in NetBox")
    return clean(value, source)


def _optional(value: str, source: str) -> str:
    return clean(value, source) if value else ""


def _kg(weight: Any, unit: str) -> float | None:
    """A weight in kg; of an unknown unit as it is."""
    number = _number(weight)
    return None if number is None else round(number * _KG.get(unit, 1.0), 1)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and 0 <= number <= 1e6 else None


def _whole(value: Any) -> int | None:
    """Units, half ones rounded up; of "42U" too."""
    number = _number(value.rstrip("uU ") if isinstance(value, str) else value)
    return None if number is None or number > 100 else math.ceil(number)
