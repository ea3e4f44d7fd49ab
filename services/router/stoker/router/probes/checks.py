"""Direct health checks: what this router finds out about engines by itself, whatever registries say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from stoker.router import core
from stoker.router.config import ChecksConfig
from stoker.router.fleet.pools import Target
from stoker.router.fleet.view import View
from stoker.router.http.engines import EngineFailed, Engines

log = structlog.get_logger(__name__)

# An engine found dead is looked at more often: it may be back any moment.
_DEAD_INTERVAL_S = 0.25


class HealthChecks:
    """One task per replica of the view. `sync` follows the view's replicas."""

    def __init__(
        self,
        view: View,
        engines: Engines,
        config: ChecksConfig,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._view = view
        self._engines = engines
        self._config = config
        self._rng = rng
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def sync(self) -> None:
        """Check all replicas of the view, and no others."""
        for gone in self._tasks.keys() - self._view.targets.keys():
            self._tasks.pop(gone).cancel()
        for target in self._view.targets.values():
            if target.id not in self._tasks and target.url:
                self._tasks[target.id] = asyncio.create_task(self._check(target))

    async def close(self) -> None:
        """Stop checking."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _check(self, target: Target) -> None:
        failed_before = False
        while True:
            base = self._config.interval_s if target.reachable else min(_DEAD_INTERVAL_S, self._config.interval_s)
            await asyncio.sleep(base * (0.8 + 0.4 * self._rng.random()))
            if not target.url:
                continue
            fine = await self._ask(target)
            if target.pool is not None and (failed_before or not fine):
                outcome = core.Outcome.OK if fine else core.Outcome.FAULT
                ejected = target.pool.fleet.observe(target.id, outcome, self._clock())
                if ejected or not target.reachable:
                    target.found_dead()
            failed_before = not fine

    async def _ask(self, target: Target) -> bool:
        """Whether /health says yes. A refused connection or a "no" is conclusive; silence is only a bad sign."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async with await self._engines.call("GET", f"{target.url}/health") as answer:
                    await answer.read()
                    fine = answer.status == 200
        except EngineFailed as error:
            if error.refused:
                self._view.reached(target, False)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the replica did not say yes
            log.info("checks.no_answer", replica=target.id, error=str(error) or type(error).__name__)
            return False
        self._view.reached(target, fine)
        return fine
