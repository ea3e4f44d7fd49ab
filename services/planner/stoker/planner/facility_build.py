"""From what a facility file says to the `Facility`: ranges spelled out, types filled in, names checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stoker.planner.core.facility import checks, fabrics
from stoker.planner.core.facility.values import (
    Distance,
    Envelope,
    Facility,
    Feed,
    Gpu,
    Link,
    Node,
    Rack,
    Site,
    Switch,
)
from stoker.planner.core.units import link_rate, watts
from stoker.planner.facility_names import Names, Place, TooMany
from stoker.planner.facility_schema import (
    EnvelopeEntry,
    FabricEntry,
    FacilityFile,
    FeedEntry,
    NodeEntry,
    NodeTypeEntry,
    RackEntry,
    RowEntry,
    SiteEntry,
)
from stoker.planner.facility_types import Types, Wrong, hint, node_entry

_ALIKE = 2
"""So many faults are told of one line."""


def build(file: FacilityFile, catalogue: FacilityFile, wrong: Wrong) -> Facility:
    """The facility, as far as it can be made; what is wrong is told by path in the file."""
    try:
        return _Build(file, catalogue, wrong).run()
    except TooMany:
        return Facility(file.name)


class _Build:
    """The facility as it is put together."""

    def __init__(self, file: FacilityFile, catalogue: FacilityFile, wrong: Wrong) -> None:
        self._file = file
        self._wrong = wrong
        self._names = Names(wrong)
        self._types = Types(file, catalogue, wrong)
        self._sites: dict[str, Site] = {}
        self._feeds: dict[str, Feed] = {}
        self._racks: dict[str, Rack] = {}
        self._nodes: dict[str, Node] = {}
        self._switches: dict[str, Switch] = {}
        self._links: list[Link] = []
        self._envelopes: list[Envelope] = []
        self._feed_paths: dict[str, str] = {}

    def run(self) -> Facility:
        for name, entry in self._file.sites.items():
            self._site(name, entry)
        self._domains()
        self._add_switches()
        self._add_links()
        self._add_fabrics()
        self._feeds = {name: self._topped(feed) for name, feed in self._feeds.items()}
        facility = Facility(
            name=self._file.name,
            gpu_types=self._types.gpus,
            node_types=self._types.nodes,
            rack_types=self._types.racks,
            sites=self._sites,
            feeds=self._feeds,
            racks=self._racks,
            nodes=self._nodes,
            switches=self._switches,
            links=tuple(self._links),
            distances=tuple(self._distances()),
            envelopes=tuple(self._envelopes),
        )
        self._tell(checks.faults(facility))
        return facility

    def _tell(self, faults: Iterable[checks.Fault]) -> None:
        """Tell the faults; of many at one place, as of all racks of a range, the first ones."""
        told: Counter[str] = Counter()
        for fault in faults:
            path = self._feed_paths.get(fault.name) or self._names.paths.get(fault.name, "")
            told[path] += 1
            if told[path] <= _ALIKE:
                self._wrong(path, f"{fault.name}: {fault.what}")
        for path, count in told.items():
            if count > _ALIKE:
                self._wrong(path, f"and {count - _ALIKE} more faults of what stands here")

    # --- places ---

    def _site(self, name: str, entry: SiteEntry) -> None:
        path = f"sites.{name}"
        if not self._names.proper(name, path) or not self._names.claimed(name, path):
            return
        supply = None if entry.supply_kw is None else watts(entry.supply_kw)
        if supply is not None and entry.reserved_kw > (entry.supply_kw or 0):
            self._wrong(f"{path}.reserved_kw", f"{entry.reserved_kw:g} is more than supply_kw, {entry.supply_kw:g}")
        self._sites[name] = Site(
            name,
            region=entry.region,
            provider=entry.provider,
            supply=supply,
            reserved=watts(entry.reserved_kw),
            cost_per_kwh=entry.cost_per_kwh,
            fabric_ports=entry.fabric_ports,
            cost_factor=entry.cost_factor,
        )
        place = {"site": name}
        for pattern, suite in entry.suites.items():
            for each in self._names.expanded(pattern, f"{path}.suites.{pattern}", place):
                self._rows(suite.rows, f"{path}.suites.{pattern}.rows", {**place, "suite": each})
                self._row(suite, f"{path}.suites.{pattern}", {**place, "suite": each})
        self._rows(entry.rows, f"{path}.rows", place)
        self._row(entry, path, place)
        for stem, envelope in entry.envelopes.items():
            self._envelope(stem, envelope, f"{path}.envelopes.{stem}", place)

    def _rows(self, rows: Mapping[str, RowEntry], path: str, place: Place) -> None:
        for pattern, row in rows.items():
            for each in self._names.expanded(pattern, f"{path}.{pattern}", place):
                self._row(row, f"{path}.{pattern}", {**place, "row": each})

    def _row(self, row: RowEntry, path: str, place: Place) -> None:
        self._own_feeds(row.feeds, f"{path}.feeds", place)
        for pattern, rack in row.racks.items():
            at = f"{path}.racks.{pattern}"
            settings = self._types.rack_settings(rack, at)
            names = [name for name in self._names.expanded(pattern, at, place) if self._names.claimed(name, at)]
            dealt = self._dealt(settings, names, at)
            for name in names:
                self._rack(name, settings, at, {**place, "rack": name}, dealt.get(name, ()))

    def _rack(
        self, name: str, entry: RackEntry, path: str, place: Place, dealt: Iterable[tuple[str, str, NodeEntry]]
    ) -> None:
        feeds = self._rack_feeds(entry, path, place)
        self._racks[name] = self._rack_value(name, entry, path, place, feeds)
        for pattern, node, node_path in self._own_nodes(entry, path):
            for number, each in enumerate(self._names.expanded(pattern, node_path, place)):
                self._node(each, node, node_path, name, number)
        placed: Counter[str] = Counter()
        for each, node_path, node in dealt:
            self._node(each, node, node_path, name, placed[node_path])
            placed[node_path] += 1

    def _rack_value(self, name: str, entry: RackEntry, path: str, place: Place, feeds: tuple[str, ...]) -> Rack:
        if entry.fill:
            self._types.known_node_type(entry.fill, f"{path}.fill")
        return Rack(
            name,
            site=place["site"],
            suite=place.get("suite", ""),
            row=place.get("row", ""),
            height_u=entry.height_u or 42,
            reserved_u=entry.reserved_u or 0,
            weight_kg=entry.weight_kg,
            cooling=None if entry.cooling_kw is None else watts(entry.cooling_kw),
            feeds=feeds,
            survives_loss=entry.survives_loss is not False,
            base_power=watts(entry.base_kw or 0),
            type=entry.type,
            fill=entry.fill or "",
        )

    def _envelope(self, stem: str, entry: str | EnvelopeEntry, path: str, place: Place) -> None:
        settings = self._types.rack_settings(entry, path)
        within = {**place, "rack": stem}
        self._names.proper(stem, path)
        feeds: list[Feed] = []
        if isinstance(settings.feeds, list):
            self._wrong(f"{path}.feeds", "racks that are not listed need feeds of their own: give kw, and `parent`")
        elif settings.feeds:
            for pattern, feed in settings.feeds.items():
                at = f"{path}.feeds.{pattern}"
                feeds += [self._feed(name, feed, at, within) for name in self._names.expanded(pattern, at, within)]
        if not settings.fill and len(settings.nodes) == 1:
            settings.fill = node_entry(next(iter(settings.nodes.values()))).type
        if not settings.fill:
            self._wrong(path, "fill is missing: name the node type that these racks hold")
        rack = self._rack_value(stem, settings, path, place, tuple(feed.name for feed in feeds))
        racks = entry.racks if isinstance(entry, EnvelopeEntry) else None
        self._envelopes.append(Envelope(rack, tuple(feeds), racks))

    # --- feeds ---

    def _rack_feeds(self, entry: RackEntry, path: str, place: Place) -> tuple[str, ...]:
        if isinstance(entry.feeds, list):
            return tuple(name for text in entry.feeds for name in self._names.expanded(text, f"{path}.feeds", place))
        return tuple(self._own_feeds(entry.feeds or {}, f"{path}.feeds", place))

    def _own_feeds(self, feeds: Mapping[str, FeedEntry], path: str, place: Place) -> list[str]:
        names = []
        for pattern, entry in feeds.items():
            at = f"{path}.{pattern}"
            for name in self._names.expanded(pattern, at, place):
                if name in self._feeds:
                    there = self._feed_paths[name]
                    self._wrong(at, f"feed {name} is there already, by {there}; put $row or $rack into its name")
                    continue
                self._feeds[name] = self._feed(name, entry, at, place)
                self._feed_paths[name] = at
                names.append(name)
        return names

    def _feed(self, name: str, entry: FeedEntry, path: str, place: Place) -> Feed:
        if entry.parent and entry.source:
            self._wrong(f"{path}.source", "only a feed without parent has a source of its own; the others have its")
        given = [entry.kw is not None, entry.usable_kw is not None, entry.volts is not None or entry.amps is not None]
        capacity = None
        if sum(given) > 1:
            self._wrong(path, "give one of kw, usable_kw, or volts with amps")
        elif entry.usable_kw is not None:
            capacity = watts(entry.usable_kw)
        elif entry.kw is not None:
            capacity = watts(entry.kw * entry.derating)
        elif given[2]:
            if entry.volts is None or entry.amps is None:
                self._wrong(path, "volts and amps belong together")
            factor = math.sqrt(3) if entry.phases == "3" else 1.0
            capacity = watts((entry.volts or 0) * (entry.amps or 0) * factor / 1e3 * entry.derating)
        parent = self._names.filled_in(entry.parent, path, place)
        return Feed(name, source=entry.source, capacity=capacity, parent=parent)

    def _topped(self, feed: Feed) -> Feed:
        """A feed with the source that stands at the top of its tree."""
        top = feed
        for _ in range(checks.DEEPEST_FEED):
            top = self._feeds.get(top.parent, top)
        return replace(feed, source=top.source or top.name)

    # --- nodes ---

    def _own_nodes(self, entry: RackEntry, path: str) -> Iterable[tuple[str, NodeEntry, str]]:
        for pattern, node in entry.nodes.items():
            if "$" in pattern:
                yield pattern, node_entry(node), f"{path}.nodes.{pattern}"

    def _dealt(self, entry: RackEntry, racks: list[str], path: str) -> dict[str, list[tuple[str, str, NodeEntry]]]:
        """Nodes numbered through, dealt out to the racks in their order, to each as many."""
        dealt: dict[str, list[tuple[str, str, NodeEntry]]] = {rack: [] for rack in racks}
        for pattern, node in entry.nodes.items():
            at = f"{path}.nodes.{pattern}"
            if "$" in pattern or not racks:
                continue
            names = self._names.expanded(pattern, at, {})
            each, rest = divmod(len(names), len(racks))
            if rest:
                self._wrong(
                    at,
                    f"{len(names)} nodes cannot be dealt out evenly to {len(racks)} racks; "
                    "name as many for each, or put $rack into the name",
                )
                continue
            for number, rack in enumerate(racks):
                dealt[rack] += [(name, at, node_entry(node)) for name in names[number * each : (number + 1) * each]]
        return dealt

    def _node(self, name: str, entry: NodeEntry, path: str, rack: str, number: int) -> None:
        if not self._types.known_node_type(entry.type, path) or not self._names.claimed(name, path):
            return
        kind = self._types.entries[entry.type]
        self._names.count(kind.gpus or 0, path)
        height = self._types.nodes[entry.type].height_u
        self._nodes[name] = Node(
            name,
            rack=rack,
            type=entry.type,
            gpus=self._gpus(name, rack, kind),
            bottom_u=entry.bottom_u + number * height if entry.bottom_u else 0,
            labels=entry.labels,
        )

    def _gpus(self, node: str, rack: str, kind: NodeTypeEntry) -> tuple[Gpu, ...]:
        count = kind.gpus or 0
        unknown = [-1] * count
        rails = kind.rails
        if rails is None:
            rails = list(range(count)) if kind.fabric_ports == count else unknown
        domains = self._scale_up(node, rack, kind)
        roots, numa = kind.pcie_roots or unknown, kind.numa or unknown
        return tuple(Gpu(at, domains[at], roots[at], numa[at], rails[at]) for at in range(count))

    def _scale_up(self, node: str, rack: str, kind: NodeTypeEntry) -> list[str]:
        count, scale_up = kind.gpus or 0, kind.scale_up
        if scale_up is None:
            scale_up = "node" if kind.gpu and self._types.gpus[kind.gpu].scale_up_bandwidth else "none"
        if isinstance(scale_up, list):
            group_of = {gpu: number for number, group in enumerate(scale_up) for gpu in group}
            return [f"{node}/{group_of[at]}" for at in range(count)]
        return [{"node": node, "rack": rack}.get(scale_up, "")] * count

    def _domains(self) -> None:
        for domain, patterns in self._file.scale_up_domains.items():
            path = f"scale_up_domains.{domain}"
            self._names.proper(domain, path)
            for name in self._known(self._names.listed(patterns, path), path):
                node = self._nodes[name]
                self._nodes[name] = replace(node, gpus=tuple(replace(gpu, scale_up=domain) for gpu in node.gpus))

    def _known(self, names: list[str], path: str) -> list[str]:
        """Those of the names that are nodes; the others are told, by the first of them."""
        unknown = [name for name in names if name not in self._nodes]
        if unknown:
            more = f", nor {len(unknown) - 1} more" if unknown[1:] else ""
            self._wrong(path, f"no such node as {unknown[0]!r}{more}; {hint(unknown[0], self._nodes)}")
        return [name for name in names if name in self._nodes]

    # --- fabric ---

    def _add_switches(self) -> None:
        for pattern, entry in self._file.switches.items():
            path = f"switches.{pattern}"
            if entry.rack and entry.rack not in self._racks:
                self._wrong(f"{path}.rack", f"no such rack as {entry.rack!r}; {hint(entry.rack, self._racks)}")
            for name in self._names.expanded(pattern, path, {}):
                if self._names.claimed(name, path):
                    self._switches[name] = Switch(name, entry.tier, entry.radix, entry.rack, entry.rail)

    def _add_links(self) -> None:
        for number, entry in enumerate(self._file.links):
            path = f"links.{number}"
            uppers = self._names.expanded(entry.upper, path, {})
            for lower in self._names.expanded(entry.lower, path, {}):
                for upper in uppers:
                    self._names.count(1, path)
                    for end in (lower, upper):
                        self._names.paths.setdefault(end, path)
                    rate, latency = link_rate(entry.gbit_per_s), entry.latency_us / 1e6
                    self._links.append(Link(lower, upper, rate, entry.count, latency, entry.rail))

    def _add_fabrics(self) -> None:
        for name, entry in self._file.fabrics.items():
            path = f"fabrics.{name}"
            if not self._names.proper(name, path):
                continue
            named = self._names.listed(entry.nodes, path)
            nodes = self._known(named, path)
            if nodes and len(nodes) == len(named):
                self._fabric(name, entry, nodes, path)

    def _fabric(self, name: str, entry: FabricEntry, nodes: list[str], path: str) -> None:
        types = {self._nodes[node].type: self._types.nodes[self._nodes[node].type] for node in nodes}
        fewest = min(kind.fabric_ports for kind in types.values())
        ports = entry.ports_per_node or fewest
        if ports > fewest or not ports:
            least = min(types.values(), key=lambda kind: kind.fabric_ports)
            self._wrong(path, f"node type {least.name} has {fewest} ports on the fabric; give it fabric_ports")
            return
        rate = link_rate(entry.gbit_per_s) if entry.gbit_per_s else min(kind.port_rate for kind in types.values())
        if not rate:
            self._wrong(path, "gbit_per_s is missing: neither the fabric nor its node types say it")
            return
        fabric = fabrics.Fabric(
            name,
            radix=entry.radix,
            rate=rate,
            uplink_rate=link_rate(entry.uplink_gbit_per_s) if entry.uplink_gbit_per_s else rate,
            oversubscription=entry.oversubscription,
            spines=entry.spines,
            latency_s=entry.latency_us / 1e6,
        )
        self._names.count(len(nodes) * ports, path)
        made = fabrics.rails if entry.kind == "rail-optimised" else fabrics.clos
        try:
            switches, links = fabrics.built(fabric, made(name, nodes, entry.nodes_per_leaf, ports))
        except fabrics.Unbuildable as error:
            self._wrong(path, str(error))
            return
        self._switches |= {switch.name: switch for switch in switches if self._names.claimed(switch.name, path)}
        self._links += links

    def _distances(self) -> Iterable[Distance]:
        regions = {site.region for site in self._sites.values() if site.region}
        for number, entry in enumerate(self._file.distances):
            path = f"distances.{number}"
            if len(entry.between) != 2 or entry.between[0] == entry.between[1]:
                self._wrong(path, "between must name two regions: between: [eu-west, us-east]")
                continue
            for region in entry.between:
                if region not in regions:
                    self._wrong(path, f"no site is in region {region!r}; {hint(region, regions)}")
            one, other = entry.between
            yield Distance(one, other, entry.latency_ms / 1e3, entry.cost_per_gb)
