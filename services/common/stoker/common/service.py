"""How a Stoker service starts and stops.

SIGTERM and SIGINT ask it to stop: it says NOT_SERVING, drains, and ends. A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import structlog
import uvloop

from stoker.common import config as configuration
from stoker.common import logs
from stoker.common.errors import StokerError

log = structlog.get_logger(__name__)

C = TypeVar("C")

EXIT_STAY_DOWN = 78
"""Starting again would fail again, or fight a process that took over. Units name it in RestartPreventExitStatus."""

_STAY_DOWN = {"BAD_CONFIG", "SUPERSEDED"}


def main(
    name: str,
    about: str,
    config_type: type[C],
    serve: Callable[[C, asyncio.Event], Awaitable[None]],
    flags: Mapping[str, str] | None = None,
) -> None:
    """The whole of a service's `main`: reads flags and configuration, then runs `serve(config, stop)`.

    `serve` returns after `stop` is set and its drain is done. `flags` are settings with a flag of their own, and its
    help. Exit status: 0 stopped as asked, 1 an error that the message explains, 2 bad usage, 78 an error that a
    restart cannot mend, 130 forced.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        epilog=f"example: {name} --config /etc/stoker/{name.removeprefix('stoker-')}.yaml --set log.level=debug",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML settings; defaults where absent")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting")
    parser.add_argument("--print-config", action="store_true", help="print the effective settings and exit")
    parser.add_argument("--log-level", default=os.environ.get("STOKER_LOG_LEVEL", "info"), help="debug, info, …")
    for setting, meaning in (flags or {}).items():
        parser.add_argument(f"--{setting}", metavar="VALUE", help=meaning)
    args = parser.parse_args()
    overrides = [f"{setting}={value}" for setting in flags or {} if (value := getattr(args, setting)) is not None]
    os.environ["STOKER_LOG_LEVEL"] = args.log_level  # of the processes that it starts
    logs.setup(name, level=args.log_level)
    try:
        config = configuration.load(config_type, args.config, [*args.set, *overrides])
        if args.print_config:
            sys.stdout.write(configuration.describe(config))
            return
    except StokerError as error:
        _fail(error)
    run(serve, config)


def run(serve: Callable[[C, asyncio.Event], Awaitable[None]], config: C) -> None:
    """Run `serve` in this process until it is asked to stop, and exit as `main` does."""
    try:
        uvloop.run(_until_stopped(serve, config))
    except* StokerError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, StokerError)  # noqa: S101
        _fail(error)


def _fail(error: StokerError) -> NoReturn:
    log.error("service.failed", reason=error.reason, error=error.message)
    sys.exit(EXIT_STAY_DOWN if error.reason in _STAY_DOWN else 1)


async def _until_stopped(serve: Callable[[C, asyncio.Event], Awaitable[None]], config: C) -> None:
    stop = asyncio.Event()

    def on_signal(signum: int) -> None:
        if stop.is_set():
            log.warning("service.forced", signal=signal.Signals(signum).name)
            os._exit(130)
        log.info("service.stopping", signal=signal.Signals(signum).name)
        stop.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    await serve(config, stop)
