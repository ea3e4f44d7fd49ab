"""The only way in which other services speak to the registry.

- `RegistryClient`: calls, with failover over all registries.
- `FleetWatch`: the fleet as all registries together tell it; keeps its last view whatever happens.
- `DispatchAnnouncer`: what a router tells the other routers of its dispatches.
- `Leadership`: staying leader of a role, and knowing at once when no more.
- `ReportSession`: an agent's stream, moved from registry to registry as they come and go.
"""

from stoker.registry.client.announce import Demands, DispatchAnnouncer
from stoker.registry.client.calls import RegistryClient
from stoker.registry.client.events import (
    AgentEvent,
    AssignmentsChanged,
    Connected,
    DemandSeen,
    DigestChanged,
    Disconnected,
    DispatchesSeen,
    FleetEvent,
    LoadChanged,
    RecordsChanged,
    ResyncWanted,
    SourceChanged,
)
from stoker.registry.client.leadership import Leadership
from stoker.registry.client.report import ReportSession, Superseded
from stoker.registry.client.watch import FleetWatch
from stoker.registry.core.merge import FleetView

__all__ = [
    "AgentEvent",
    "AssignmentsChanged",
    "Connected",
    "DemandSeen",
    "Demands",
    "DigestChanged",
    "Disconnected",
    "DispatchAnnouncer",
    "DispatchesSeen",
    "FleetEvent",
    "FleetView",
    "FleetWatch",
    "Leadership",
    "LoadChanged",
    "RecordsChanged",
    "RegistryClient",
    "ReportSession",
    "ResyncWanted",
    "SourceChanged",
    "Superseded",
]
