"""Runs one member of a replica: sees, lets the core decide, does it, writes it down and says so."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import StokerError
from stoker.node_agent import launch, state_files, telemetry, wire
from stoker.node_agent.core import lifecycle
from stoker.node_agent.core.digest import nothing
from stoker.node_agent.core.gang import Peer, State
from stoker.node_agent.core.lifecycle import Act, Exit, Member, Seen
from stoker.node_agent.core.load import in_flight
from stoker.node_agent.core.task import Task
from stoker.node_agent.engine.protocol import LaunchCommand
from stoker.node_agent.life import Life
from stoker.node_agent.process import LIFE_VARIABLE, EngineProcess, find_by_token
from stoker.node_agent.retiring import Retiring
from stoker.node_agent.state_files import DigestCopy, Record
from stoker.node_agent.surroundings import Surroundings

log = structlog.get_logger(__name__)

_TICK_S = 0.1
_LOG_LINES = 400
_BLOCK_SIZE = 16
"""Tokens a KV block of an engine that does not say."""
_ADOPTION_PROBE_S = 1.0
_TROUBLED = {State.BACKOFF, State.STARTING, State.STOPPED}


class MemberRunner:
    """One member on this host, from its assignment until it is forgotten."""

    def __init__(self, around: Surroundings, task: Task, record: Record | None = None) -> None:
        now = time.monotonic()
        self.member = record.member(now) if record is not None else Member(task=task, since=now)
        self.gone = asyncio.Event()
        """Set once the member is over and its records are dropped."""
        self._around = around
        self._wanted: Task | None = task
        self._peers: Mapping[int, Peer] = {}
        self._record = record or state_files.record_of(self.member)
        self._process: EngineProcess | None = None
        self._life: Life | None = None
        self._info: records_pb2.EngineInfo | None = None
        self._exit: Exit | None = None
        self._log_tail: list[str] = []
        self._tiers: list[tuple[str, ...]] = [("GPU",)]
        """What each data-parallel rank told of."""
        self._wake = asyncio.Event()
        self._retiring = Retiring(around.tls, around.keys, around.config.retire.busy_pause_s, self._wake.set)
        self._since_wall_s = time.time()
        self._reported: records_pb2.MemberStatus | None = None
        self._loop: asyncio.Task[None] | None = None

    # --- from outside -------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Names the member on this host."""
        return self.member.task.key

    @property
    def replica_id(self) -> str:
        """The replica this is a member of."""
        return self.member.task.replica_id

    @property
    def status(self) -> records_pb2.MemberStatus:
        """The member as it is reported."""
        member = self.member
        tail = self._log_tail if member.state in _TROUBLED else []
        return wire.status_of(
            member,
            node_id=self._around.node.node_id,
            incarnation=self._around.node.incarnation,
            pid=self._process.pid if self._process is not None and self._process.alive else 0,
            since_wall_s=self._since_wall_s,
            engine=self.engine_info,
            last_error=lifecycle.compose_error(member.last_error, tail),
            retired=self._retiring.done,
            warmed_tokens=self._retiring.warmed_tokens,
        )

    @property
    def engine_info(self) -> records_pb2.EngineInfo | None:
        """How to reach and understand the engine; None before it first served."""
        return self._life.info if self._life is not None and self._life.info is not None else self._info

    @property
    def life(self) -> Life | None:
        """What accompanies the engine; None while none runs."""
        return self._life

    @property
    def log_path(self) -> Path:
        """The engine's output."""
        return self._around.state.log_path(self.key)

    def assign(self, task: Task | None, peers: Mapping[int, Peer]) -> None:
        """What is assigned now (None: nothing any more), and how the rest of the gang stands."""
        self._wanted, self._peers = task, peers
        self._wake.set()

    async def start(self) -> None:
        """Begin; an engine that the record tells of is taken over first, if it still runs."""
        if self._record.token:
            await self._adopt()
        await self._report()
        self._loop = asyncio.create_task(self._run(), name=f"member {self.key}")

    async def stop(self) -> None:
        """Let go of the engine, which lives on, and leave on disk what the next agent needs."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._retiring.stop()
        if self._life is not None:
            with contextlib.suppress(OSError):
                await self._life.save()
            await self._life.close()
        if self._process is not None:
            self._process.release()

    # --- the loop -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self.gone.is_set():
            try:
                await self._step()
            except Exception:
                # One member's trouble must not cost the others: say it, and look again.
                log.exception("member.step_failed", member=self.key)
                await asyncio.sleep(1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _step(self) -> None:
        before = self.member
        exit_, self._exit = self._exit, None
        if exit_ is not None:
            await self._note_exit(exit_)
        self.member, acts = lifecycle.step(
            before, self._seen(exit_), self._around.policy, time.monotonic(), self._around.rng
        )
        if self.member.state is not before.state:
            self._note_change(before)
            if self.member.state is State.READY:
                await self._note_model()
        if exit_ is not None and self.member.task.leads:
            # Withdrawn: a new epoch that holds nothing.
            for rank, tiers in enumerate(self._tiers):
                for piece in nothing(self.member.epoch, tiers):
                    self._around.reports.publish_digest(wire.piece_of(self.replica_id, rank, piece))
        self._retire()
        for act in acts:
            await self._do(act)
        if not self.gone.is_set():
            await self._report()

    def _retire(self) -> None:
        """Do what the member is asked to before it drains, while its engine serves."""
        life, info = self._life, self.engine_info
        if not self.member.serving or life is None or info is None:
            self._retiring.end()
            return
        longest = info.max_model_len - 1 if info.max_model_len else sys.maxsize
        block_size = info.block_size or _BLOCK_SIZE
        self._retiring.follow(self.member.task.retirement, life.prompts, info.model_names[0], longest, block_size)

    def _seen(self, exit_: Exit | None) -> Seen:
        life = self._life
        load = life.load if life is not None else None
        engine = in_flight(load)
        return Seen(
            task=self._wanted,
            alive=self._process is not None and self._process.alive,
            wall_ms=int(time.time() * 1000),
            exit=exit_,
            health=life.health if life is not None else None,
            peers=self._peers,
            in_flight=None if engine is None else engine + self._around.relayed(self.replica_id),
            in_flight_at=load.at if load is not None else 0.0,
            started_before=self._around.state.was_ready(self.member.task.model),
        )

    def _note_change(self, before: Member) -> None:
        self._since_wall_s = time.time()
        member = self.member
        log.info(
            "member.state",
            member=self.key,
            state=member.state.value,
            was=before.state.value,
            attempt=member.attempt,
            error=member.last_error if member.state is State.BACKOFF else None,
        )

    async def _note_model(self) -> None:
        try:
            await asyncio.to_thread(self._around.state.note_ready, self.member.task.model)
        except OSError as error:
            log.warning("member.model_not_noted", member=self.key, error=str(error))

    async def _note_exit(self, exit_: Exit) -> None:
        asked = self.member.terminated_at is not None
        telemetry.ENGINE_EXITS.labels("asked" if asked else "unasked").inc()
        log.info("member.engine_ended", member=self.key, code=exit_.code, asked=asked, error=exit_.error or None)
        self._log_tail = await asyncio.to_thread(state_files.last_lines, self.log_path, _LOG_LINES)
        await self._close_life()
        if self._record.address is not None:
            launch.free_address(self.member.task, self._record.address, self._around.ports)
        self._record = state_files.record_of(self.member)

    async def _do(self, act: Act) -> None:
        match act:
            case Act.LAUNCH:
                await self._launch()
            case Act.TERMINATE if self._process is not None:
                self._process.terminate()
            case Act.KILL if self._process is not None:
                log.warning("member.engine_killed", member=self.key, pid=self._process.pid)
                self._process.kill()
            case Act.FORGET:
                # Without a pause: an assignment that comes now must find either this member or none.
                self._around.state.remove(self.key)
                self._around.reports.member_gone(self.replica_id, self.member.task.rank)
                self.gone.set()

    async def _report(self) -> None:
        """Write down and tell what changed since the last time."""
        status = self.status
        if status == self._reported:
            return
        # Told first: a slow disk must not keep routers on a dead engine.
        self._around.reports.publish_member(status)
        self._record = state_files.record_of(self.member, self._record)
        await self._write_down()
        self._reported = status

    async def _write_down(self) -> None:
        await asyncio.to_thread(self._around.state.write, self._record)

    # --- the engine ---------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        around, task = self._around, self.member.task
        self._log_tail = []
        try:
            engine = launch.engine_of(task, around.config)
            address = launch.take_address(task, around.config, around.ports)
            self._record = replace(state_files.record_of(self.member), address=address)
            request = launch.request_of(task, address, self.log_path)
            command = engine.command(request)
            await self._open_life(Life(around, self.member, engine, request, self._wake.set))
            await self._start_process(command)
        except (StokerError, OSError) as error:
            self._exit = Exit(error=f"the engine cannot be started: {error}")
            self._wake.set()

    async def _start_process(self, command: LaunchCommand) -> None:
        # First the intent, then the deed: an agent killed in between leaves a token by which to find the engine.
        token = secrets.token_hex(16)
        argv_sha256 = hashlib.sha256("\0".join(command.argv).encode()).hexdigest()
        self._record = replace(self._record, token=token, argv_sha256=argv_sha256)
        await self._write_down()
        env = {**command.env, LIFE_VARIABLE: token}
        process = EngineProcess.launch(command.argv, env, self.log_path, self._ended)
        self._process = process
        self._record = replace(self._record, pid=process.pid, started=process.started)
        await self._write_down()
        telemetry.ENGINE_STARTS.inc()
        log.info("member.launched", member=self.key, pid=process.pid, attempt=self.member.attempt)

    def _ended(self, code: int | None) -> None:
        self._exit = Exit(code)
        self._wake.set()

    async def _adopt(self) -> None:
        record, around = self._record, self._around
        pid, started = record.pid, record.started
        if not pid and (found := await asyncio.to_thread(find_by_token, record.token)) is not None:
            pid, started = found
        self._process = EngineProcess.adopt(pid, started, self._ended) if pid else None
        if self._process is None or record.address is None:
            log.warning("member.engine_gone", member=self.key, pid=pid)
            self._exit = Exit(error="the engine ended while no agent ran")
            return
        self._record = replace(record, pid=pid, started=started)
        telemetry.ADOPTIONS.inc()
        log.info("member.adopted", member=self.key, pid=pid)
        task = self.member.task
        launch.keep_address(task, record.address, around.ports)
        try:
            engine = launch.engine_of(task, around.config)
            request = launch.request_of(task, record.address, self.log_path)
            copies = await asyncio.to_thread(around.state.read_digests, self.key)
            life = Life(around, self.member, engine, request, self._wake.set)
            await self._open_life(life, copies)
            # Known to be ready from the first report on: an agent's restart is no change for routers.
            if task.leads:
                await life.probe(_ADOPTION_PROBE_S)
        except StokerError as error:
            log.error("member.adoption_incomplete", member=self.key, error=error.message)

    async def _open_life(self, life: Life, resume: Sequence[DigestCopy] = ()) -> None:
        await self._close_life()
        self._life = life
        await life.open(resume)

    async def _close_life(self) -> None:
        life, self._life = self._life, None
        if life is None:
            return
        self._info = life.info or self._info
        self._tiers = [digest.tiers for digest in life.digests] or self._tiers
        await life.close()
