"""Requests for a model that no replica is ready for, held while one starts: they are what a scaler wakes for.

They wait before they are planned, because without a replica nothing is known of the model's tokenizer. When one is
ready they go on in fair order: by priority, within one a request of each tenant in turn. Whom that replica has no
room for waits on in its queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.common.errors import DeadlineExceeded, Exhausted, Unavailable
from stoker.router import metrics
from stoker.router.config import QueueConfig
from stoker.router.fleet.view import View
from stoker.router.flights.demand import Waiting
from stoker.router.flights.tenants import Caller

_RETRY_S = 5.0
"""A start takes longer, but whoever comes back is held again, and keeps the demand known."""


@dataclass(slots=True, eq=False)
class _Held:
    caller: Caller
    since: float
    turn: asyncio.Future[None]


class Holding:
    """All who are held, by model."""

    def __init__(
        self,
        view: View,
        config: QueueConfig,
        clock: Callable[[], float],
        refused: Callable[[str], None] = lambda model: None,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        """`refused` hears of each that is turned away, by its model; `began` when a model has a first to wait."""
        self._view = view
        self._config = config
        self._clock = clock
        self._refused = refused
        self._began = began
        self._held: dict[str, list[_Held]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def waiting(self) -> Iterator[Waiting]:
        """Those who are held now."""
        for model, held in self._held.items():
            for each in held:
                yield Waiting(model, each.since, held=True)

    def needed(self, model: str) -> bool:
        """Whether a request has to wait: no replica can take it, and one would be started for it."""
        if self._view.able(model) or not self._view.synced:
            return False
        return self._view.deployed.wakes(model)

    async def wait(self, model: str, caller: Caller, until: float | None) -> None:
        """Wait until a replica is ready, if that is needed; at most until `until` by the loop's clock.

        Raises Exhausted (QUEUE_FULL), Unavailable (NOT_STARTED) after the queue's longest wait, and DeadlineExceeded
        when `until` has passed. Returns, too, where none would be started any more.
        """
        while self.needed(model):
            await self._wait_once(model, caller, until)

    async def _wait_once(self, model: str, caller: Caller, until: float | None) -> None:
        line = self._held.setdefault(model, [])
        if len(line) >= self._config.limit:
            self._refused(model)
            raise Exhausted(
                f"{len(line)} requests wait for a first replica of {model!r}, as many as may (queue.limit); "
                "try again later",
                reason="QUEUE_FULL",
                retry_after_s=_RETRY_S,
            )
        loop = asyncio.get_running_loop()
        held = _Held(caller, self._clock(), loop.create_future())
        line.append(held)
        if len(line) == 1:
            self._began()
        longest = loop.time() + self._config.longest_s
        try:
            async with asyncio.timeout_at(longest if until is None else min(until, longest)):
                await held.turn
        except TimeoutError:
            self._refused(model)
            if until is not None and until < longest:
                raise DeadlineExceeded(
                    f"model {model!r} is scaled to zero, and no replica was ready in time; ask again later, or allow "
                    "more time",
                    retry_after_s=_RETRY_S,
                ) from None
            raise Unavailable(
                f"model {model!r} is scaled to zero, and no replica was ready within {self._config.longest_s:g} s "
                "(queue.longest_s); try again after the delay, or see `stoker scaler why` and `stoker status`",
                reason="NOT_STARTED",
                retry_after_s=_RETRY_S,
            ) from None
        finally:
            line.remove(held)
            if not line and self._held.get(model) is line:
                del self._held[model]
            metrics.QUEUE_WAIT.observe(self._clock() - held.since)

    def pump(self) -> None:
        """The fleet changed: let those go whose model has a replica now, or will have none."""
        for model, held in self._held.items():
            if not self.needed(model):
                for each in _in_fair_order(held):
                    if not each.turn.done():
                        each.turn.set_result(None)


def _in_fair_order(held: list[_Held]) -> Iterator[_Held]:
    """By priority, within one the first of each tenant, then the second of each, in order of arrival."""
    turns: dict[tuple[int, str], int] = {}
    order = []
    for place, each in enumerate(held):
        key = (each.caller.priority, each.caller.tenant)
        nth = turns[key] = turns.get(key, -1) + 1
        order.append((each.caller.priority, nth, place))
    for _, _, place in sorted(order):
        yield held[place]
