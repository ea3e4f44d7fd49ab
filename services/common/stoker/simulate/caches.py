"""What the scaler knows of the replicas' caches: from routers' dispatches and agents' digests, as in its service."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from stoker.bench.replicas import Clock, Engine, Job
from stoker.common.blocks import SAMPLE
from stoker.router.core import Delta
from stoker.scaler.core import warming
from stoker.scaler.core.warming import Warming
from stoker.scaler.core.warmth import Warmth, Worth


class Caches:
    """The followed blocks of one deployment, and the prompts that they stand for."""

    def __init__(self, block_size: int, clock: Clock) -> None:
        self._warmth = Warmth(block_size)
        self._tokens = float(block_size * self._warmth.config.sample)
        self._clock = clock
        self._asked: OrderedDict[int, tuple[Job, int]] = OrderedDict()

    def dispatched(self, job: Job) -> None:
        """A router sent a request to some replica."""
        sampled = [(place, key) for place, key in enumerate(job.keys) if key % SAMPLE == 0]
        self._warmth.used([key for _, key in sampled], self._clock.now)
        for place, key in sampled:
            self._asked[key] = job, place
            self._asked.move_to_end(key)
        while len(self._asked) > self._warmth.limit:
            self._asked.popitem(last=False)

    def told(self, replica: str, delta: Delta) -> None:
        """A replica holds other blocks than before."""
        for keys in delta.removed.values():
            self._warmth.removed(replica, keys, self._clock.now)
        for keys in delta.stored.values():
            self._warmth.stored(replica, keys, self._clock.now)

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        self._warmth.forget(replica)

    def worth(self, going: Collection[str]) -> Worth:
        """What all hold, when so many go."""
        return self._warmth.worth(self._clock.now, staying=self._staying(going))

    def warmings(self, going: Collection[str], heirs: Collection[str], budget_tokens: float) -> tuple[Warming, ...]:
        """The prefixes of those that go which `heirs` are to compute, best first."""
        blocks = self._warmth.held_by(going, self._clock.now, staying=self._staying(going))
        return warming.plan(blocks, heirs, self._tokens, budget_tokens)

    def prompt(self, leaf: int, holder: Engine) -> tuple[int, ...]:
        """The blocks of the prompt that a followed one stands for, up to the next that is followed; none where
        `holder` has not got them all any more."""
        if leaf not in self._asked:
            return ()
        job, place = self._asked[leaf]
        held = holder.cache.hit(job.keys)
        if held <= place:
            return ()
        ends = (at for at in range(place + 1, held) if job.keys[at] % SAMPLE == 0)
        return job.keys[: next(ends, held)]

    def _staying(self, going: Collection[str]) -> float:
        there = self._warmth.replicas
        return 1.0 - len(set(going) & set(there)) / max(1, len(there))
