"""While a replica retires: its prompts are computed on those that stay, as its agent would have it done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stoker.bench.replicas import Clock, Engine, Job
from stoker.common.blocks import at_most
from stoker.scaler.core.warming import Warming

_BUSY_S = 0.5
"""Until a successor that has enough to do is asked again."""
_FULL = 0.9
"""Share of a successor's blocks in use from which it has enough to do."""


class Retirement:
    """One prompt at a time on each successor, all successors at once, until all are computed or time is up."""

    def __init__(
        self,
        warmings: Sequence[Warming],
        engines: Mapping[str, Engine],
        prompt: Callable[[int], tuple[int, ...]],
        compute: Callable[[str, Job, Callable[[], None]], None],
        clock: Clock,
        timeout_s: float,
        block_size: int,
        done: Callable[[], None],
    ) -> None:
        """`engines` are those that serve, as they come and go; `prompt` tells the blocks that a leaf stands for;
        `compute` has a job done on one of them and calls back."""
        self._left = at_most(sum(warming.tokens for warming in warmings), block_size)
        self._engines = engines
        self._prompt = prompt
        self._compute = compute
        self._clock = clock
        self._done = done
        self._over = False
        by_heir: dict[str, list[Warming]] = {}
        for warming in reversed(warmings):
            by_heir.setdefault(warming.successor, []).append(warming)
        self._open = len(by_heir)
        for heir, theirs in by_heir.items():
            clock.after(0.0, partial(self._next, heir, theirs))
        clock.after(timeout_s, self._finish)

    def end(self) -> None:
        """Nothing more is asked: the replica runs on."""
        self._over = True

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._done()

    def _next(self, heir: str, left: list[Warming]) -> None:
        """Ask for the best of what is left there, its last."""
        while left and not self._over and heir in self._engines:
            engine = self._engines[heir]
            if engine.waiting or engine.cache.pinned > _FULL * engine.hardware.kv_blocks:
                self._clock.after(_BUSY_S, partial(self._next, heir, left))
                return
            warming = left.pop()
            keys = self._prompt(warming.leaf) if warming.tokens <= self._left else ()
            if keys:
                size = engine.hardware.block_size
                self._left -= size * (len(keys) - engine.cache.hit(keys))
                job = Job(self._clock.now, keys, size * len(keys), 1, warming=True)
                self._compute(heir, job, partial(self._next, heir, left))
                return
        self._open -= 1
        if not self._open:
            self._finish()
