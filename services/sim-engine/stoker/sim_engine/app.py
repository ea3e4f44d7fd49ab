"""Starts a simulated engine: `python -m stoker.sim_engine.app --model DIR …`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import uvloop
from aiohttp import web

from stoker.common import otel
from stoker.common.errors import StokerError
from stoker.sim_engine import gang
from stoker.sim_engine.config import SimConfig, parse
from stoker.sim_engine.engine import SimEngine
from stoker.sim_engine.publisher import Publisher
from stoker.sim_engine.server import Server
from stoker.sim_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


async def serve(config: SimConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises `GangBroken` when another member of the gang is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_work(config))
        await stop.wait()
        work.cancel()


async def _work(config: SimConfig) -> None:
    if config.gang is not None and config.gang.rank > 0:
        await gang.member(config.gang)
        return
    head = gang.Head(config.gang) if config.gang is not None else None
    await asyncio.sleep(config.faults.start_delay_s)
    if head is not None:
        await head.joined()
    tokenizer = Tokenizer(config.model)
    publishers = []
    if config.kv_events is not None:
        publishers = [
            Publisher(config.kv_events, config.block_size, rank=rank, drop_every=config.faults.drop_events)
            for rank in range(config.data_parallel)
        ]
    ranks = [
        SimEngine(config, tokenizer.sayable, publishers[rank] if publishers else None, rank)
        for rank in range(config.data_parallel)
    ]
    runner = web.AppRunner(Server(ranks, tokenizer).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
        log.info("serving %s on %s:%d", config.served_names[0], config.host, config.port)
        async with asyncio.TaskGroup() as tasks:
            for work in (*(rank.run() for rank in ranks), *(each.serve_replay() for each in publishers)):
                tasks.create_task(work)
            if head is not None:
                tasks.create_task(head.broken())
    finally:
        await runner.cleanup()
        if head is not None:
            await head.close()
        for publisher in publishers:
            publisher.close()


def main() -> None:
    """The console entry."""
    # The standard library's logging: a fleet of these runs on one machine, and each module weighs on each.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = parse()
    except StokerError as error:
        sys.exit(f"stoker-sim-engine: {error.message}")
    try:
        with contextlib.suppress(asyncio.CancelledError), otel.traced("vllm", config.otlp_endpoint):
            uvloop.run(serve(config))
    except* (gang.GangBroken, OSError) as failed:
        sys.exit(f"stoker-sim-engine: {_first(failed)}")


def _first(failed: BaseException) -> BaseException:
    return _first(failed.exceptions[0]) if isinstance(failed, BaseExceptionGroup) else failed


if __name__ == "__main__":
    main()
