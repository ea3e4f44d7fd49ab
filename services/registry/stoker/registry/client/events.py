"""What a `FleetWatch` and a `ReportSession` tell their owners."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.api.registry.v1 import registry_pb2


@dataclass(frozen=True)
class RecordsChanged:
    """Records that came or changed, and names that went, merged over all registries.

    `snapshot` says that this is the difference to a whole snapshot: the first one carries everything, a later
    one only what changed while the stream was away. Never a clear followed by a refill.
    """

    upserts: registry_pb2.Records
    removals: registry_pb2.Removals
    snapshot: bool


@dataclass(frozen=True)
class LoadChanged:
    """Newer load of some replicas."""

    loads: tuple[registry_pb2.ReplicaLoad, ...]


@dataclass(frozen=True)
class DigestChanged:
    """KV blocks of one replica and tier: a whole snapshot in one piece, or the delta that follows the last one."""

    update: registry_pb2.DigestUpdate


@dataclass(frozen=True)
class SourceChanged:
    """A registry came, went, or said how fresh its view is. `freshness` is the last it said, None before."""

    endpoint: str
    connected: bool
    freshness: registry_pb2.Freshness | None


@dataclass(frozen=True)
class DispatchesSeen:
    """What another router has just dispatched. Soft: some may be missing, none comes twice."""

    sender: str
    dispatches: tuple[registry_pb2.Dispatch, ...]


@dataclass(frozen=True)
class DemandSeen:
    """Demand that one router sees, counted from `began_ns` on: by model what changed, about once a second. None where
    nothing did: what was told before is as fresh as this.

    Another `began_ns` means that the router's counters began anew. `gone`: no registry hears it now; it may come
    back and count on. A router that says nothing for 30 s has ended, whatever was said of it.
    """

    router_id: str
    began_ns: int
    demand: tuple[registry_pb2.Demand, ...]
    gone: bool
    age_s: float


FleetEvent = RecordsChanged | LoadChanged | DigestChanged | SourceChanged | DispatchesSeen | DemandSeen


@dataclass(frozen=True)
class Connected:
    """A registry admitted the agent; digests of all replicas will be asked for anew."""

    endpoint: str
    registry_id: str


@dataclass(frozen=True)
class Disconnected:
    """No registry hears the agent now; the session looks for one."""

    endpoint: str
    because: str


@dataclass(frozen=True)
class AssignmentsChanged:
    """All that this node shall run."""

    assignments: registry_pb2.NodeAssignments


@dataclass(frozen=True)
class ResyncWanted:
    """The digest of this replica is not trusted: publish a snapshot of each of its tiers."""

    replica_id: str


AgentEvent = Connected | Disconnected | AssignmentsChanged | ResyncWanted
