"""What accompanies one life of an engine: its events, health, load, constants, and the size of its log."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import StokerError
from stoker.common.fingerprint import fingerprint
from stoker.node_agent import state_files, telemetry, tokenizer_files, wire
from stoker.node_agent.block_feed import BlockFeed
from stoker.node_agent.core.digest import CacheDigest
from stoker.node_agent.core.lifecycle import Member
from stoker.node_agent.core.load import Load, Meter, measure
from stoker.node_agent.core.prompts import Prompt, PromptOf, end_of, sole_followers
from stoker.node_agent.core.task import argument
from stoker.node_agent.engine.client import EngineClient
from stoker.node_agent.engine.protocol import Engine, EngineInfo, Health, KvEndpoint, LaunchRequest
from stoker.node_agent.state_files import DigestCopy
from stoker.node_agent.surroundings import Surroundings

log = structlog.get_logger(__name__)

_STARTING_PROBE_S = 0.25
_LOG_CHECK_S = 5.0


class Life:
    """One life of one engine, from just before its process starts until just after it ended."""

    def __init__(
        self,
        around: Surroundings,
        member: Member,
        engine: Engine,
        request: LaunchRequest,
        changed: Callable[[], None],
    ) -> None:
        self.health: Health | None = None
        """The latest answer; SERVING only once the constants are known too."""
        self.load: Load | None = None
        self.info: records_pb2.EngineInfo | None = None
        self.client = EngineClient(around.session, request.base_url, around.config.lifecycle.probe_timeout_s)
        self._around = around
        self._config = around.config
        self._task = member.task
        self._epoch = member.epoch
        self._engine = engine
        self._request = request
        self._changed = changed
        self._meter = Meter(None, None)
        self._rank_meters: list[Meter] = []
        """One for each data-parallel rank, where there are several."""
        self._load_sequence = _wall_ms()
        self._feeds: list[BlockFeed] = []
        """One for each data-parallel rank; none for a member that does not serve."""
        self._saved_version = -1
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, resume: Sequence[DigestCopy] = ()) -> None:
        """Begin. Raises Unavailable when an address for KV events is taken."""
        if self._task.leads:
            endpoints = self._engine.kv_endpoints(self._request) or (None,)
            copies = resume if len(resume) == len(endpoints) else [None] * len(endpoints)
            self._feeds = [self._feed(endpoint, copy) for endpoint, copy in zip(endpoints, copies, strict=True)]
            for feed in self._feeds:
                await feed.open()
            self.resync()
            for work in (self._probe_for_ever, self._scrape_for_ever, self._save_for_ever):
                self._tasks.append(asyncio.create_task(work()))
        self._tasks.append(asyncio.create_task(self._bound_log_for_ever()))

    def _feed(self, endpoint: KvEndpoint | None, resume: DigestCopy | None) -> BlockFeed:
        digest = CacheDigest(self._task.served_model_name, prompt_bytes=self._config.retire.prompt_bytes)
        # An agent that adopts an engine goes on in the same epoch, above all that was told before.
        digest.begin(self._epoch, sequence=_wall_ms())
        known = resume is not None and digest.restore(resume.image)
        return BlockFeed(
            self._task.replica_id,
            digest,
            endpoint,
            self._around.reports.publish_digest,
            interval_s=self._config.report.digest_interval_s,
            batch=self._config.report.digest_batch,
            resume_from=resume.next_seq if resume is not None and known else 0,
        )

    async def close(self) -> None:
        """Stop all of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for feed in self._feeds:
            await feed.close()

    def resync(self) -> None:
        """Tell the whole block digests."""
        for feed in self._feeds:
            feed.tell_all()

    @property
    def digests(self) -> list[CacheDigest]:
        """The block digest of each data-parallel rank; none for a member that does not serve."""
        return [feed.digest for feed in self._feeds]

    async def prompts(self) -> PromptOf:
        """What finds the prompt that a block stands for; None where no cache of the engine is known to hold it."""
        caches = [digest.prompts for digest in self.digests]
        followers = [await asyncio.to_thread(sole_followers, cache.copy()) for cache in caches]

        def prompt_of(leaf: int) -> Prompt | None:
            for cache, follows in zip(caches, followers, strict=True):
                # What went on from it may have been evicted since.
                found = cache.prompt(end_of(leaf, follows)) or cache.prompt(leaf)
                if found is not None:
                    return found
            return None

        return prompt_of

    # --- health -------------------------------------------------------------------------------------------

    async def probe(self, timeout_s: float) -> None:
        """Ask for health once, and for the constants once it serves."""
        health = await self.client.health(timeout_s)
        if health is Health.SERVING and self.info is None:
            try:
                await self._introduce(await self.client.info())
            except StokerError as error:
                log.info("engine.not_introduced", replica=self._task.replica_id, error=error.message)
                health = Health.UNREACHABLE
        if health is not self.health:
            self.health = health
            self._changed()

    async def _introduce(self, info: EngineInfo) -> None:
        files = await asyncio.to_thread(tokenizer_files.find, self._task)
        self.info = wire.engine_info(
            info,
            http_url=f"http://{self._around.node.host}:{self._request.http_port}",
            kind=self._engine.name,
            tokenizer_sha256=fingerprint(files),
            max_num_seqs=argument(self._task.engine_args, "--max-num-seqs") or 0,
            data_parallel=self._request.data_parallel,
        )
        self._meter = Meter(info.block_size, info.kv_blocks)
        ranks = self._request.data_parallel
        of_each = info.kv_blocks // ranks if info.kv_blocks else None
        self._rank_meters = [Meter(info.block_size, of_each) for _ in range(ranks if ranks > 1 else 0)]
        if of_each:
            for feed in self._feeds:
                feed.digest.bound(of_each)

    async def _probe_for_ever(self) -> None:
        lifecycle = self._config.lifecycle
        while True:
            await self.probe(lifecycle.probe_timeout_s)
            ready = self.health is Health.SERVING
            pause_s = lifecycle.probe_interval_s
            await asyncio.sleep(pause_s if ready else min(_STARTING_PROBE_S, pause_s))

    # --- load ---------------------------------------------------------------------------------------------

    async def _scrape_for_ever(self) -> None:
        config = self._config.report
        due = time.monotonic()
        while True:
            if self.info is not None:
                await self._scrape(config.load_timeout_s)
            # A slow scrape delays the next one: two at once would only slow the engine further.
            due = max(due + config.load_interval_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _scrape(self, timeout_s: float) -> None:
        try:
            scrape, *of_ranks = await self.client.loads(timeout_s, len(self._rank_meters))
        except StokerError as error:
            telemetry.SCRAPE_FAILURES.inc()
            log.debug("engine.scrape_failed", replica=self._task.replica_id, error=error.message)
            return
        now = time.monotonic()
        self._meter, self.load = measure(self._meter, scrape, now)
        ranks = [measure(meter, of_rank, now) for meter, of_rank in zip(self._rank_meters, of_ranks, strict=True)]
        self._rank_meters = [meter for meter, _ in ranks]
        self._load_sequence += 1
        replica_id = self._task.replica_id
        relayed = self._around.relayed(replica_id)
        loads = [load for _, load in ranks]
        report = wire.load_of(
            replica_id, self._epoch, self._load_sequence, self.load, loads, relayed=relayed, now=now
        )
        self._around.reports.publish_load([report])

    # --- files --------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Copy the block digests to disk if they changed since the last time."""
        if not self._feeds or self._version == self._saved_version:
            return
        for feed in self._feeds:
            feed.flush()
        version, copies = self._version, [feed.copy() for feed in self._feeds]
        await asyncio.to_thread(self._around.state.write_digests, self._task.key, copies)
        self._saved_version = version

    @property
    def _version(self) -> int:
        return sum(digest.version for digest in self.digests)

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.report.checkpoint_interval_s)
            with contextlib.suppress(OSError):  # a full disk costs the copy, not the digest
                await self.save()

    async def _bound_log_for_ever(self) -> None:
        path: Path = self._request.log_path
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            await asyncio.to_thread(state_files.bound_log, path, self._config.max_log_bytes)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
