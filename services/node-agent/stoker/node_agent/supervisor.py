"""All members of a host: begins what is assigned, takes over what an earlier agent left, ends the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial

import structlog

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.errors import InvalidRequest, NotFound, Unavailable
from stoker.node_agent import telemetry, wire
from stoker.node_agent.core.digest import TIERS, CacheDigest
from stoker.node_agent.core.gang import State
from stoker.node_agent.core.task import Task
from stoker.node_agent.engine.client import EngineClient
from stoker.node_agent.member import MemberRunner
from stoker.node_agent.surroundings import Surroundings

log = structlog.get_logger(__name__)


class Supervisor:
    """The members of one host, by key."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._runners: dict[str, MemberRunner] = {}
        for state in State:
            telemetry.MEMBERS.labels(state.value).set_function(partial(self._in_state, state))
        for tier in TIERS:
            telemetry.DIGEST_BLOCKS.labels(tier).set_function(partial(self._blocks_in, tier))
        telemetry.PROMPT_BYTES.set_function(self._prompt_bytes)

    def _in_state(self, state: State) -> int:
        return sum(runner.member.state is state for runner in self.runners)

    def _blocks_in(self, tier: str) -> int:
        return sum(digest.count(tier) for digest in self._digests())

    def _prompt_bytes(self) -> int:
        return sum(digest.prompts.bytes for digest in self._digests())

    def _digests(self) -> Iterator[CacheDigest]:
        lives = [runner.life for runner in self.runners]
        return (digest for life in lives if life is not None for digest in life.digests)

    @property
    def runners(self) -> Iterable[MemberRunner]:
        """All members that exist."""
        return [runner for runner in self._runners.values() if not runner.gone.is_set()]

    async def adopt(self) -> None:
        """Take over every member an earlier agent has left; without assignments, they go on as they were."""
        runners = [MemberRunner(self._around, record.task, record) for record in self._around.state.records()]
        for runner in runners:
            self._runners[runner.key] = runner
        await asyncio.gather(*(runner.start() for runner in runners))

    async def assign(self, assignments: registry_pb2.NodeAssignments) -> None:
        """Obey: these are all assignments of this node; what is not among them drains and stops."""
        tasks = {task.key: task for task in self._tasks(assignments)}
        for key, runner in list(self._runners.items()):
            if runner.gone.is_set():
                del self._runners[key]
        for key, task in tasks.items():
            if key not in self._runners:
                self._runners[key] = runner = MemberRunner(self._around, task)
                await runner.start()
            self._runners[key].assign(task, wire.peers_of(assignments.peers, task))
        for key, runner in self._runners.items():
            if key not in tasks:
                runner.assign(None, {})

    def _tasks(self, assignments: registry_pb2.NodeAssignments) -> Iterator[Task]:
        node, lifecycle = self._around.node, self._around.config.lifecycle
        hosts = {other.node_id: other.host for other in assignments.nodes} | {node.node_id: node.host}
        for assignment in assignments.assignments:
            try:
                yield from wire.tasks_of(
                    assignment,
                    node.node_id,
                    hosts,
                    startup_timeout_s=lifecycle.startup_timeout_s,
                    drain_timeout_s=lifecycle.drain_timeout_s,
                )
            except InvalidRequest as error:
                log.error("supervisor.assignment_refused", error=error.message)

    def drain_all(self) -> None:
        """Let every engine finish and stop."""
        for runner in self._runners.values():
            runner.assign(None, {})

    async def wait_gone(self) -> None:
        """Until no member is left."""
        await asyncio.gather(*(runner.gone.wait() for runner in self._runners.values()))

    async def stop(self) -> None:
        """Let go of all engines; they live on."""
        await asyncio.gather(*(runner.stop() for runner in self._runners.values()))

    def resync(self, replica_id: str) -> None:
        """Tell the whole block digest of a replica."""
        for runner in self.runners:
            if runner.replica_id == replica_id and runner.life is not None:
                runner.life.resync()

    # --- for callers --------------------------------------------------------------------------------------

    def statuses(self) -> list[records_pb2.MemberStatus]:
        """All members as they are reported."""
        return [runner.status for runner in self.runners]

    def find(self, replica_id: str) -> MemberRunner:
        """The serving member of a replica, else any member of it. Raises NotFound when none is on this host."""
        found = [runner for runner in self.runners if runner.replica_id == replica_id]
        if not found:
            here = ", ".join(sorted(runner.replica_id for runner in self.runners)) or "none"
            raise NotFound(
                f"replica_id: {replica_id[:80]!r} is not on node {self._around.node.node_id}; here: {here}",
                reason="REPLICA_NOT_FOUND",
            )
        return min(found, key=lambda runner: runner.member.task.rank)

    def serving(self, replica_id: str, model: str) -> MemberRunner:
        """The member to send a new request to. Raises NotFound, or Unavailable with reason REPLICA_…

        Without `replica_id`, the ready replica of `model` with the fewest requests.
        """
        if not replica_id:
            return self._least_loaded(model)
        runner = self.find(replica_id)
        if model and (info := runner.engine_info) is not None and model not in info.model_names:
            raise _no_such_model(model, info.model_names)
        if not runner.member.serving:
            raise _not_serving(runner)
        return runner

    def _least_loaded(self, model: str) -> MemberRunner:
        named = [r for r in self.runners if r.engine_info is not None and model in r.engine_info.model_names]
        if not named:
            known = {name for r in self.runners if r.engine_info is not None for name in r.engine_info.model_names}
            raise _no_such_model(model, known)
        ready = [runner for runner in named if runner.member.serving]
        if not ready:
            raise _not_serving(named[0])
        return min(ready, key=lambda runner: self._around.relayed(runner.replica_id))

    def client(self, replica_id: str, model: str) -> EngineClient:
        """The engine of the member to send a new request to. Raises as `serving` does."""
        runner = self.serving(replica_id, model)
        if runner.life is None:
            raise _not_serving(runner)
        return runner.life.client


def _no_such_model(model: str, known: Iterable[str]) -> NotFound:
    names = ", ".join(sorted(known)) or "none"
    return NotFound(f"model: {model[:80]!r} is not served here; known: {names}", reason="MODEL_NOT_FOUND")


def _not_serving(runner: MemberRunner) -> Unavailable:
    state = runner.member.state
    draining = state in {State.DRAINING, State.STOPPED}
    return Unavailable(
        f"replica {runner.replica_id} takes no requests: it is {state.value}",
        reason="REPLICA_DRAINING" if draining else "REPLICA_NOT_READY",
        retry_after_s=1.0,
    )
