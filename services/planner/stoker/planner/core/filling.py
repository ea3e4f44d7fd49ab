"""Filling racks, those of a facility and those that its envelopes stand for, until something runs out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from stoker.common.errors import InvalidRequest
from stoker.planner.core.elevation import Elevation
from stoker.planner.core.facility.values import Envelope, Facility, Gpu, Node, NodeType, Rack, Site
from stoker.planner.core.limits import Kind, Limit, Scope, tightest
from stoker.planner.core.ordering import natural
from stoker.planner.core.supply import Supply, feeds_of
from stoker.planner.core.units import NO_POWER, Watts

MOST_NODES = 100_000
"""More are refused: a GW of small hosts is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is set up at once: a node, or all nodes that a rack comes with, and what its switches draw."""

    name: str
    nodes: tuple[NodeType, ...]
    base_power: Watts = NO_POWER

    @property
    def power(self) -> Watts:
        """Watts of all of it."""
        return Watts(self.base_power + sum(node.max_power for node in self.nodes))

    def limits(self, room: Room, supplied: Iterable[Limit], ports: Limit | None) -> list[Limit]:
        """What bounds how many more of it a rack takes."""
        rack, at = room.rack, room.rack.name
        height = sum(node.height_u for node in self.nodes)
        fits = room.elevation.room(height) if len(self.nodes) == 1 else None
        limits = list(supplied)
        limits.append(
            Limit(Kind.SPACE, Scope.RACK, at, room.elevation.usable, room.elevation.used, height, room=fits)
        )
        if rack.cooling is not None:
            limits.append(Limit(Kind.COOLING, Scope.RACK, at, rack.cooling, room.drawn, self.power))
        if rack.weight_kg is not None:
            weight = sum(node.weight_kg for node in self.nodes)
            limits.append(Limit(Kind.WEIGHT, Scope.RACK, at, rack.weight_kg, room.weight_kg, weight))
        if ports is not None:
            limits.append(replace(ports, each=sum(node.fabric_ports for node in self.nodes)))
        return limits


@dataclass(slots=True)
class Room:
    """One rack on its way. `full` is what keeps the next batch out of it, `last` what was tried."""

    rack: Rack
    elevation: Elevation
    nodes: int = 0
    gpus: int = 0
    weight_kg: float = 0.0
    drawn: Watts = NO_POWER
    last: Batch | None = None
    full: Limit | None = None


class Filling:
    """One filling of one facility; see `envelope.capacity` for what `fill` means."""

    def __init__(self, facility: Facility, fill: str, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._given, self._types = facility, facility.node_types
        self._rack_type = facility.rack_types.get(fill)
        self._node_type = "" if self._rack_type else fill
        racks = sorted(facility.racks.values(), key=lambda rack: natural(rack.name))
        self._supply = Supply(facility.sites, facility.feeds, racks)
        self._ports = {name: _ports(facility, site) for name, site in facility.sites.items()}
        self._nodes, self._racks, self._feeds = dict(facility.nodes), dict(facility.racks), dict(facility.feeds)
        self._places: dict[str, Limit] = {}
        self._short: Limit | None = None
        self.what = fill
        standing = defaultdict(list)
        for node in facility.nodes.values():
            standing[node.rack].append(node)
        self.rooms = [self._standing(rack, standing[rack.name]) for rack in racks]

    def fill(self) -> None:
        """Fills what is to be filled."""
        said = any(room.rack.fill for room in self.rooms) or bool(self._given.envelopes)
        common = _commonest(self._given)
        for room in self.rooms:
            if not said or room.rack.fill:
                self._fill_up(room, self._node_type or room.rack.fill or common)
        for envelope in self._given.envelopes:
            self._set_up(envelope)

    def facility(self) -> Facility:
        """The facility with all that was added, and no envelope left to fill."""
        return replace(self._given, nodes=self._nodes, racks=self._racks, feeds=self._feeds, envelopes=())

    def power(self) -> Watts:
        """What all racks draw at the most."""
        return Watts(sum(room.drawn for room in self.rooms))

    def binding(self) -> Limit | None:
        """What keeps the next one out: of the site or a feed where racks could take more, else of most racks."""
        if self._short is not None:
            return self._short
        fulls = [room.full for room in self.rooms if room.full is not None]
        if not fulls:
            return None
        kind = Counter(limit.kind for limit in fulls).most_common(1)[0][0]
        return next(limit for limit in fulls if limit.kind is kind)

    def limits(self, room: Room) -> tuple[Limit, ...]:
        """Those of a rack as it stands now, the tightest of the feeds above it, and those of its site."""
        if room.last is None:
            return ()
        now = self._limits(room, room.last)
        short = self._short
        if short is not None:
            # What ended all of it is told as it did: for a whole rack where that is what did not go in.
            now = [
                short if (each.kind, each.scope, each.at) == (short.kind, short.scope, short.at) else each
                for each in now
            ]
        feed = tightest([limit for limit in now if limit.scope is Scope.FEED])
        places = self._places.get(room.rack.site)
        kept = [limit for limit in now if limit.scope is not Scope.FEED]
        return (*kept, *((feed,) if feed else ()), *((places,) if places else ()))

    # --- one rack ---

    def _standing(self, rack: Rack, nodes: Iterable[Node]) -> Room:
        room = Room(rack, Elevation(rack, nodes, self._types))
        self._draw(room, rack.base_power)
        for node in nodes:
            self._book(room, self._types[node.type])
        return room

    def _draw(self, room: Room, power: Watts) -> None:
        room.drawn = Watts(room.drawn + power)
        self._supply.draw(room.rack, power)

    def _book(self, room: Room, kind: NodeType) -> None:
        room.nodes += 1
        room.gpus += kind.gpus
        room.weight_kg += kind.weight_kg
        self._draw(room, kind.max_power)

    def _limits(self, room: Room, batch: Batch) -> list[Limit]:
        return batch.limits(room, self._supply.limits(room.rack, batch.power), self._ports[room.rack.site])

    def _fill_up(self, room: Room, node_type: str) -> None:
        if node_type:
            self.what = self.what or node_type
            kind = self._types[node_type]
            self._add_all(room, Batch(node_type, (kind,)), most=MOST_NODES)

    def _add_all(self, room: Room, batch: Batch, *, most: int) -> int:
        """Adds a batch as often as it goes, at most `most` times; returns how often."""
        limits = self._limits(room, batch)
        many = min(most, *(limit.allows for limit in limits))
        if len(self._nodes) + many * len(batch.nodes) > MOST_NODES:
            raise InvalidRequest.field(
                "facility", f"more than {MOST_NODES:,} nodes would fit; check its supply and how many racks it has"
            )
        for _ in range(many):
            self._look()
            self._add(room, batch)
        room.last = batch
        if many < most:
            after = self._limits(room, batch)
            own = tightest([limit for limit in after if limit.scope is Scope.RACK])
            wider = tightest([limit for limit in after if limit.scope is not Scope.RACK])
            room.full = own
            if own is not None and wider is not None and wider.allows < own.allows:
                self._short = room.full = wider
        return many

    def _add(self, room: Room, batch: Batch) -> None:
        self._draw(room, batch.base_power)
        for kind in batch.nodes:
            number = room.nodes + 1
            name = next(each for at in count(number) if (each := f"{room.rack.name}-n{at}") not in self._nodes)
            domain = room.rack.name if len(batch.nodes) > 1 else name
            gpus = tuple(Gpu(index, domain) for index in range(kind.gpus))
            self._nodes[name] = Node(name, room.rack.name, kind.name, gpus, room.elevation.place(kind.height_u))
            self._book(room, kind)
            ports = self._ports[room.rack.site]
            if ports is not None:
                self._ports[room.rack.site] = replace(ports, used=ports.used + kind.fabric_ports)

    # --- envelopes ---

    def _set_up(self, envelope: Envelope) -> None:
        """Sets up racks one after the other, until one stays empty or their number is reached."""
        template, whole = self._template(envelope)
        self._refuse_endless(envelope)
        opened = 0
        for number in count(1):
            if envelope.racks is not None and opened == envelope.racks:
                break
            room = self._open(template, envelope, number)
            opens = whole is None or self._add_all(room, whole, most=1)
            if opens:
                self._fill_up(room, template.fill)
            if not room.nodes:
                self._short = room.full
                self._draw(room, Watts(-room.drawn))
                self.rooms += [] if opened else [room]
                break
            self._keep(room)
            opened += 1
        if envelope.racks is not None:
            site = template.site
            known = self._places.get(site, Limit(Kind.RACKS, Scope.SITE, site, 0, 0, 1))
            self._places[site] = replace(known, available=known.available + envelope.racks, used=known.used + opened)

    def _template(self, envelope: Envelope) -> tuple[Rack, Batch | None]:
        """The rack to repeat, and what it comes with."""
        rack = envelope.rack
        if self._node_type:
            comes_with = self._given.rack_types.get(rack.type)
            if comes_with and comes_with.nodes:
                # Its switches go with its nodes.
                rack = replace(rack, base_power=NO_POWER, reserved_u=0)
            return replace(rack, fill=self._node_type, type=""), _switches(rack.base_power)
        kind = self._rack_type or self._given.rack_types.get(rack.type)
        if self._rack_type:
            rack = replace(
                rack,
                type=self._rack_type.name,
                height_u=self._rack_type.height_u,
                reserved_u=self._rack_type.reserved_u,
                weight_kg=self._rack_type.weight_kg,
                cooling=self._rack_type.cooling,
                base_power=self._rack_type.base_power,
                fill=self._rack_type.fill,
            )
        if kind is None or not kind.nodes:
            return rack, _switches(rack.base_power)
        nodes = tuple(self._types[name] for name, many in kind.nodes.items() for _ in range(many))
        self.what = self.what or kind.name
        return rack, Batch(kind.name, nodes, rack.base_power)

    def _open(self, template: Rack, envelope: Envelope, number: int) -> Room:
        name = f"{template.name}-{number}"
        feeds = feeds_of(envelope.feeds, name)
        rack = replace(template, name=name, feeds=tuple(feed.name for feed in feeds))
        self._supply.connect(rack, feeds)
        self._feeds |= {feed.name: feed for feed in feeds}
        return Room(rack, Elevation(rack, (), self._types))

    def _keep(self, room: Room) -> None:
        self.rooms.append(room)
        self._racks[room.rack.name] = room.rack

    def _refuse_endless(self, envelope: Envelope) -> None:
        site = self._given.sites[envelope.rack.site]
        ended = envelope.racks is not None or site.supply is not None or self._ports[site.name] is not None
        if not ended and not any(feed.parent for feed in envelope.feeds):
            raise InvalidRequest.field(
                f"envelope {envelope.rack.name}",
                f"nothing ends it: say how many racks there is room for, or what site {site.name} supplies",
            )


def _switches(power: Watts) -> Batch | None:
    """What a rack draws before its first node."""
    return Batch("rack", (), power) if power else None


def _commonest(facility: Facility) -> str:
    with_gpus = Counter(node.type for node in facility.nodes.values() if facility.node_types[node.type].gpus)
    return min(with_gpus, key=lambda name: (-with_gpus[name], natural(name)), default="")


def _ports(facility: Facility, site: Site) -> Limit | None:
    """The ports for nodes on the GPU fabric, those that its nodes use, None where nobody says how many there are."""
    here = {name for name, node in facility.nodes.items() if facility.racks[node.rack].site == site.name}
    if site.fabric_ports is not None:
        used = sum(facility.node_types[facility.nodes[name].type].fabric_ports for name in here)
        return Limit(Kind.PORTS, Scope.SITE, site.name, site.fabric_ports, used, 0)
    leaves = {
        name: switch
        for name, switch in facility.switches.items()
        if switch.tier == 0
        and (facility.racks[switch.rack].site == site.name if switch.rack else len(facility.sites) == 1)
    }
    if not leaves:
        return None
    up = sum(link.count for link in facility.links if link.lower in leaves)
    used = sum(link.count for link in facility.links if link.upper in leaves and link.lower in here)
    return Limit(Kind.PORTS, Scope.SITE, site.name, sum(leaf.radix for leaf in leaves.values()) - up, used, 0)
