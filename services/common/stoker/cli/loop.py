"""Running a verb's coroutine so that Ctrl-C and SIGTERM cancel it and its clean-up still runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. A signal cancels it, once; raises KeyboardInterrupt when it was cancelled."""

    async def guarded() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        cancelled = False

        def cancel() -> None:
            # A second signal must not break the clean-up that the first one began.
            nonlocal cancelled
            if not cancelled:
                cancelled = True
                task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                loop.add_signal_handler(signum, cancel)
        return await task

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
