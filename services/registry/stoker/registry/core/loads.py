"""The newest load of each replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.api.registry.v1 import registry_pb2


@dataclass
class LoadStore:
    """Loads of the replicas whose agents speak to this registry, by replica id."""

    _loads: dict[str, registry_pb2.ReplicaLoad] = field(default_factory=dict)

    def offer(self, load: registry_pb2.ReplicaLoad) -> bool:
        """Keep a load unless one as new is held: a higher epoch, then a higher sequence, is newer."""
        held = self._loads.get(load.replica_id)
        if held is not None and (load.epoch, load.sequence) <= (held.epoch, held.sequence):
            return False
        self._loads[load.replica_id] = load
        return True

    def forget(self, replica_id: str) -> None:
        """Drop a replica's load: from now on it is unknown, which is not zero."""
        self._loads.pop(replica_id, None)

    def all(self) -> list[registry_pb2.ReplicaLoad]:
        """All that are held."""
        return list(self._loads.values())
