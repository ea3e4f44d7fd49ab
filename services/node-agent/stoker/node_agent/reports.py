"""What a member tells, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stoker.api.registry.v1 import records_pb2, registry_pb2


class Reports(Protocol):
    """Hears of members, loads and blocks. `stoker.registry.client.ReportSession` is one; nothing here blocks."""

    def publish_member(self, status: records_pb2.MemberStatus) -> None:
        """A member's state changed."""

    def member_gone(self, replica_id: str, rank: int) -> None:
        """A member exists no more."""

    def publish_load(self, loads: Sequence[registry_pb2.ReplicaLoad]) -> None:
        """Newest load of some replicas."""

    def publish_digest(self, update: registry_pb2.DigestUpdate) -> None:
        """The next step, or a piece of a snapshot, of a digest."""


class Unheard:
    """Reports of a host that stands alone: nobody listens."""

    def publish_member(self, status: records_pb2.MemberStatus) -> None:
        """Told to nobody."""

    def member_gone(self, replica_id: str, rank: int) -> None:
        """Told to nobody."""

    def publish_load(self, loads: Sequence[registry_pb2.ReplicaLoad]) -> None:
        """Told to nobody."""

    def publish_digest(self, update: registry_pb2.DigestUpdate) -> None:
        """Told to nobody."""
