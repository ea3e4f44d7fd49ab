"""Operators' writes: deployments."""

from __future__ import annotations

from collections.abc import Callable

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Conflict, NotFound
from stoker.etcd import Ambiguous, Compare, Delete, EtcdClient, Put
from stoker.registry import txns
from stoker.registry.core import keys, scaling


class DeploymentStore:
    """Writes deployments, counting their generations."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd

    async def put(self, spec: common_pb2.DeploymentSpec, expected_generation: int | None) -> records_pb2.Deployment:
        """Create or change a deployment; unchanged when it already is so."""

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            return _as_expected(current, spec, expected_generation) or _changed(current, spec)

        return await self._change(spec.name, change)

    async def scale(self, name: str, replicas: int) -> tuple[records_pb2.Deployment, int]:
        """Change the replica count alone; returns the deployment and the count before."""
        previous = 0

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            nonlocal previous
            if current is None:
                raise _no_deployment(name)
            if scaling.decided_by_policy(current.spec):
                raise Conflict(
                    f"deployment {name!r} is scaled by its {scaling.kind_name(current.spec.scaling)!r} policy, which "
                    "would undo this; change the policy's bounds, or make it fixed",
                    reason="SCALED_BY_POLICY",
                )
            previous = current.spec.replicas
            if previous == replicas:
                return current
            scaled = _changed(current, current.spec)
            scaled.spec.replicas = replicas
            return scaled

        return await self._change(name, change), previous

    async def set_policy(
        self, name: str, policy: scaling_pb2.ScalingPolicy | None, expected_generation: int | None
    ) -> records_pb2.Deployment:
        """Change the scaling policy alone; None takes it away."""

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            if current is None:
                raise _no_deployment(name)
            changed = _changed(current, current.spec)
            if policy is None:
                changed.spec.ClearField("scaling")
            else:
                changed.spec.scaling.CopyFrom(policy)
            return _as_expected(current, changed.spec, expected_generation) or changed

        return await self._change(name, change)

    async def pause(self, name: str, note: str, *, resume: bool) -> records_pb2.Deployment:
        """Pause the scaling of a deployment, or end the pause; a second pause changes the note alone."""

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            if current is None:
                raise _no_deployment(name)
            paused = current.HasField("pause")
            if (resume and not paused) or (not resume and paused and current.pause.note == note):
                return current
            changed = records_pb2.Deployment()
            changed.CopyFrom(current)
            if resume:
                changed.ClearField("pause")
            else:
                changed.pause.note = note
                if not paused:
                    changed.pause.since.GetCurrentTime()
            return changed

        return await self._change(name, change)

    async def delete(self, name: str) -> None:
        """Remove a deployment."""
        key = keys.deployment(name)
        try:
            result = await self._etcd.txn([Compare.exists(key)], [Delete(key)])
        except Ambiguous:
            if await self._etcd.get(key) is not None:
                raise
            return
        if not result.succeeded:
            raise _no_deployment(name)

    async def _change(
        self, name: str, change: Callable[[records_pb2.Deployment | None], records_pb2.Deployment]
    ) -> records_pb2.Deployment:
        key = keys.deployment(name)
        for _ in range(txns.TRIES):
            existing = await self._etcd.get(key)
            current = records_pb2.Deployment.FromString(existing.value) if existing is not None else None
            changed = change(current)
            if changed is current:
                return changed
            try:
                result = await self._etcd.txn([txns.as_read(key, existing)], [Put(key, changed.SerializeToString())])
            except Ambiguous:
                continue
            if result.succeeded:
                return changed
        raise txns.contention(f"deployment {name!r}")


def _as_expected(
    current: records_pb2.Deployment | None, spec: common_pb2.DeploymentSpec, expected_generation: int | None
) -> records_pb2.Deployment | None:
    """What is there where it is as wanted already; None where it is to be changed. Raises GENERATION_MISMATCH."""
    generation = current.generation if current is not None else 0
    if (
        current is not None
        and current.spec == spec
        and expected_generation
        in {
            None,
            generation,
            generation - 1,  # this very call, sent a second time because its answer was lost
        }
    ):
        return current
    if expected_generation is not None and expected_generation != generation:
        raise Conflict(
            f"deployment {spec.name!r} is at generation {generation}, not {expected_generation}; "
            "read it and decide anew",
            reason="GENERATION_MISMATCH",
            metadata={"generation": str(generation)},
        )
    return None


def _changed(current: records_pb2.Deployment | None, spec: common_pb2.DeploymentSpec) -> records_pb2.Deployment:
    """The next generation, with another specification; an operator's pause stays."""
    changed = records_pb2.Deployment()
    if current is not None:
        changed.CopyFrom(current)
    changed.spec.CopyFrom(spec)
    changed.generation += 1
    return changed


def _no_deployment(name: str) -> NotFound:
    return NotFound(f"deployment {name!r} does not exist; `stoker status` lists the deployments")
