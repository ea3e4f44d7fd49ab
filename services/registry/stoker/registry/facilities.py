"""Operators' writes: the facility."""

from __future__ import annotations

import hashlib

from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Conflict, NotFound
from stoker.etcd import Ambiguous, Delete, EtcdClient, KeyValue, Put
from stoker.registry import txns
from stoker.registry.core import keys


class FacilityStore:
    """Writes and reads the one facility."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd

    async def put(
        self, document_zlib: bytes, document: str, expected_revision: int | None
    ) -> records_pb2.Facility | None:
        """Writes the facility, or removes it where `document_zlib` is empty; an equal one is left as it is.

        Raises FACILITY_CHANGED where what is there was not written at `expected_revision`.
        """
        key = keys.facility()
        sha256 = hashlib.sha256(document.encode()).hexdigest()
        for _ in range(txns.TRIES):
            existing = await self._etcd.get(key)
            current = _read(existing)
            if (current.sha256 if current else "") == (sha256 if document_zlib else ""):
                return current  # as wanted already, by this very call when its answer was lost
            _require_seen(current, expected_revision)
            record = records_pb2.Facility(
                document_zlib=document_zlib, document_bytes=len(document.encode()), sha256=sha256
            )
            record.written_at.GetCurrentTime()
            operation = Put(key, record.SerializeToString()) if document_zlib else Delete(key)
            try:
                result = await self._etcd.txn([txns.as_read(key, existing)], [operation])
            except Ambiguous:
                continue
            if result.succeeded:
                record.name, record.revision = keys.CURRENT, result.revision
                return record if document_zlib else None
        raise txns.contention("the facility")

    async def get(self) -> records_pb2.Facility:
        """The facility as etcd has it. Raises NotFound."""
        found = _read(await self._etcd.get(keys.facility()))
        if found is None:
            raise NotFound("no facility was applied; planners go by what agents report. `stoker plan apply FILE`")
        return found


def _read(existing: KeyValue | None) -> records_pb2.Facility | None:
    if existing is None:
        return None
    record = records_pb2.Facility.FromString(existing.value)
    record.name, record.revision = keys.CURRENT, existing.mod_revision
    return record


def _require_seen(current: records_pb2.Facility | None, expected_revision: int | None) -> None:
    revision = current.revision if current is not None else 0
    if expected_revision is not None and expected_revision != revision:
        there = f"the facility was written at revision {revision}" if revision else "there is no facility"
        raise Conflict(
            f"{there}, not {expected_revision or 'none'}; read it (`stoker plan show`) and decide anew",
            reason="FACILITY_CHANGED",
            metadata={"revision": str(revision)},
        )
