"""What there is to place on: the facility as applied, with what agents report, read anew only where one changed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import StokerError
from stoker.planner import catalogue, facility_file
from stoker.planner.core.facility.observed import facility_of, merged
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.placement.ground import Ground, ground
from stoker.planner.core.values import Problem
from stoker.planner.reported import observed
from stoker.registry.core import documents

log = structlog.get_logger(__name__)

_MOST_CHARACTERS = 2_000
"""Of what is told of an unreadable facility."""


@dataclass(frozen=True, slots=True)
class Survey:
    """`listed` are the nodes of the facility as written, None where none was applied. `revision` is the one that is
    planned for, 0 for none. `problem` says why that is not the newest."""

    ground: Ground
    listed: frozenset[str] | None = None
    revision: int = 0
    problem: str = ""

    def on(self, problem: Problem) -> Problem:
        """`problem` on this ground."""
        listed = self.listed
        there = frozenset(node.id for node in problem.nodes)
        unlisted = there - listed if listed is not None else frozenset()
        return replace(problem, ground=self.ground, applied=listed is not None, unlisted=unlisted)


class Surveyor:
    """Keeps the survey of a view; safe to ask from several threads. A call may take seconds: it may have to read a
    file of up to 16 MiB."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_revision = 0
        self._facility: Facility | None = None
        self._revision = 0
        self._problem = ""
        self._seen: tuple[object, ...] = ()
        self.survey: Survey | None = None
        """The last one."""

    def look(self, record: records_pb2.Facility | None, nodes: Mapping[str, common_pb2.Node]) -> Survey:
        """The survey of a facility's record and the nodes that are there. A facility that cannot be read leaves the
        last one that could."""
        with self._lock:
            self._read(record)
            seen = (self._revision, self._problem, tuple(_identity(node) for _, node in sorted(nodes.items())))
            if self.survey is None or seen != self._seen:
                self.survey, self._seen = self._surveyed(nodes), seen
            return self.survey

    def _read(self, record: records_pb2.Facility | None) -> None:
        if record is None:
            self._read_revision, self._facility, self._revision, self._problem = 0, None, 0, ""
            return
        if record.revision == self._read_revision:
            return
        self._read_revision = record.revision
        try:
            text = documents.unpacked(record.document_zlib)
            self._facility = facility_file.parse(text, f"facility (revision {record.revision})")
        except StokerError as error:
            self._refuse(error.message)
        except Exception as error:
            log.exception("planner.facility_unreadable", revision=record.revision)
            self._refuse(f"reading it ended in a defect: {type(error).__name__}: {error}")
        else:
            self._revision, self._problem = record.revision, ""

    def _refuse(self, why: str) -> None:
        last = f"revision {self._revision} is planned for" if self._revision else "nothing new is placed until it can"
        self._problem = f"{why[:_MOST_CHARACTERS]}; {last}"
        log.warning("planner.facility_refused", revision=self._read_revision, because=self._problem)

    def _surveyed(self, nodes: Mapping[str, common_pb2.Node]) -> Survey:
        reported = [observed(node) for node in nodes.values()]
        if self._facility is None:
            surface = ground(facility_of(reported, catalogue.load().gpu_types))
            # A facility that nobody here could ever read may forbid anything: then no node is listed.
            return Survey(surface, frozenset() if self._problem else None, problem=self._problem)
        whole = merged(self._facility, reported)
        return Survey(ground(whole), frozenset(self._facility.nodes), self._revision, self._problem)


def _identity(node: common_pb2.Node) -> tuple[object, ...]:
    """What of a node a facility is made of: what an agent may find otherwise without a restart, and its start."""
    gpus = tuple(gpu.index for gpu in node.gpus)
    return node.node_id, node.incarnation, gpus, tuple(sorted(node.labels.items()))
