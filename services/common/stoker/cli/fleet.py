"""The fleet as registries tell it, and waiting for it to become what was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.cli.placement import Unplaced, unplaced
from stoker.common import rpc
from stoker.common.errors import Code, DeadlineExceeded, StokerError
from stoker.common.tls import Tls
from stoker.registry.client import RegistryClient

_CALL_S = 10.0
_READ_S = 3.0
_POLL_S = 0.25
_CRASHES = 3
"""A replica that ended this often before it was ever ready is taken for broken."""

State = records_pb2.State


@dataclass(frozen=True)
class Fleet:
    """Everything at one moment."""

    records: registry_pb2.Records
    loads: dict[str, registry_pb2.ReplicaLoad] = field(default_factory=dict)
    freshness: registry_pb2.Freshness = field(default_factory=registry_pb2.Freshness)
    unreachable: tuple[str, ...] = ()
    unplaced: tuple[Unplaced, ...] | None = None
    """What the planner could not place, and why; None where no leading planner was asked."""

    def deployment(self, name: str) -> records_pb2.Deployment | None:
        """A deployment by name."""
        return next((d for d in self.records.deployments if d.spec.name == name), None)

    def desired(self, name: str) -> records_pb2.Desired | None:
        """What was decided for a deployment, None while nothing is."""
        return next((d for d in self.records.desired if d.deployment == name), None)

    def replicas(self, deployment: str) -> list[records_pb2.Replica]:
        """A deployment's replicas, by id."""
        found = [r for r in self.records.replicas if r.deployment == deployment]
        return sorted(found, key=lambda r: r.replica_id)


class Registries:
    """All registries: writes go to whichever answers, reads gather from each, and from the planners named."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None = None, planners: Sequence[str] = ()) -> None:
        self._tls = tls
        self._planners = planners
        self.client = RegistryClient(endpoints, timeout_s=_CALL_S, tls=tls)
        self._each = {endpoint: RegistryClient([endpoint], timeout_s=_READ_S, tls=tls) for endpoint in endpoints}

    async def __aenter__(self) -> Registries:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(client.close() for client in (self.client, *self._each.values())))

    async def fleet(self) -> Fleet:
        """Records of the registry that is furthest, loads of all. Raises StokerError when none answers."""
        good: list[registry_pb2.GetFleetResponse] = []
        failures: dict[str, StokerError] = {}

        async def ask(endpoint: str, client: RegistryClient) -> None:
            try:
                good.append(await client.get_fleet())
            except StokerError as error:
                failures[endpoint] = _plain(endpoint, error)

        told, *_ = await asyncio.gather(
            unplaced(self._planners, self._tls),
            *(ask(endpoint, client) for endpoint, client in self._each.items()),
        )
        if not good:
            raise next(iter(failures.values()))
        best = max(good, key=lambda a: (a.records.revision, -a.freshness.etcd_staleness_ms))
        loads: dict[str, registry_pb2.ReplicaLoad] = {}
        for load in (load for answer in good for load in answer.loads):
            known = loads.get(load.replica_id)
            if known is None or (load.epoch, load.sequence) > (known.epoch, known.sequence):
                loads[load.replica_id] = load
        return Fleet(best.records, loads, best.freshness, tuple(sorted(failures)), told)

    async def facility(self) -> records_pb2.Facility | None:
        """The facility that is planned for, if one is applied."""
        try:
            return await self.client.get_facility()
        except StokerError as error:
            if error.reason == "NOT_FOUND":
                return None
            raise


def explained(endpoint: str, failure: grpc.RpcError) -> StokerError:
    """A failed call as an error that names the address; gRPC's own words about sockets are left out."""
    return _plain(endpoint, rpc.error_from(failure))


def _plain(endpoint: str, error: StokerError) -> StokerError:
    if error.reason == Code.UNAVAILABLE.name and "connect" in error.message:
        return StokerError(f"nothing answers at {endpoint}", code=Code.UNAVAILABLE, reason="UNREACHABLE")
    return error


# --- waiting -----------------------------------------------------------------------------------------------


def summary(fleet: Fleet, deployment: str) -> str:
    """One line: which replicas stand where."""
    replicas = fleet.replicas(deployment)
    states = [f"{r.replica_id} {state_name(r.state)}" for r in replicas]
    missing = homeless(fleet, deployment)
    if missing or not states:
        why = "; ".join(entry.reason.rstrip(".") for entry in fleet.unplaced or () if entry.deployment == deployment)
        waiting = "waiting for placement" + (f" ({why})" if why else "")
        states.append(f"{missing} {waiting}" if states else waiting)
    return f"{deployment}: {', '.join(states)}"


def homeless(fleet: Fleet, deployment: str) -> int:
    """How many of the replicas decided on are on no node; 0 while nothing is decided."""
    desired = fleet.desired(deployment)
    return max(0, desired.replicas - len(fleet.replicas(deployment))) if desired is not None else 0


def state_name(state: int) -> str:
    """A state in lower case, without its prefix."""
    return State.Name(state).removeprefix("STATE_").lower()  # type: ignore[arg-type]


def last_error(replica: records_pb2.Replica) -> str:
    """What went wrong last in any member, empty if nothing did."""
    return next((m.last_error for m in replica.members if m.last_error), "")


def settled(fleet: Fleet, name: str) -> bool:
    """Whether a deployment has exactly the replicas that were decided on its present generation, all ready."""
    deployment, desired = fleet.deployment(name), fleet.desired(name)
    if deployment is None or desired is None or desired.generation < deployment.generation:
        return False
    replicas = fleet.replicas(name)
    return len(replicas) == desired.replicas and all(r.state == State.STATE_READY for r in replicas)


def broken(fleet: Fleet, name: str) -> records_pb2.Replica | None:
    """A replica that keeps dying before it is ready."""
    for replica in fleet.replicas(name):
        if replica.state == State.STATE_BACKOFF and any(
            m.attempt >= _CRASHES and not m.HasField("startup_s") for m in replica.members
        ):
            return replica
    return None


async def wait_settled(
    registries: Registries, name: str, *, timeout_s: float, say: Callable[[str], None] = lambda _: None
) -> Fleet:
    """Wait until `settled`. Raises StokerError when a replica keeps dying or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        fleet = await registries.fleet()
        if settled(fleet, name):
            return fleet
        say(summary(fleet, name))
        dying = broken(fleet, name)
        if dying is not None:
            raise StokerError(
                f"{dying.replica_id} keeps dying before it is ready: {last_error(dying)}", reason="CRASH_LOOP"
            )
        if time.monotonic() > deadline:
            errors = [f"\n  {r.replica_id}: {last_error(r)}" for r in fleet.replicas(name) if last_error(r)]
            raise DeadlineExceeded(
                f"{summary(fleet, name)}: not ready after {timeout_s:g} s" + "".join(errors),
                reason="NOT_PLACED_IN_TIME" if homeless(fleet, name) else "NOT_READY_IN_TIME",
            )
        await asyncio.sleep(_POLL_S)
