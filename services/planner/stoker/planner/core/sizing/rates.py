"""How long prefill and decode steps take: the roofline of each layer, and what ranks must tell each other.

A step takes the longer of its arithmetic and its reading of memory (S. Williams, A. Waterman, D. Patterson,
"Roofline", CACM 52(4), 2009), then its collective operations, then overheads that do not depend on its size. Among k
ranks an all-reduce of s bytes moves 2(k-1)/k times s over each link (R. Thakur, R. Rabenseifner, W. Gropp, 2005); an
exchange of tokens with experts moves each token to the experts that it chose, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.architecture import BF16, Format, Layers, Model, layer_tensors
from stoker.planner.core.sizing.layout import Layout, alike, kv_bytes, layer_weights
from stoker.planner.core.sizing.machine import Link, Machine


@dataclass(frozen=True, slots=True)
class Correction:
    """What measurements say of the roofline: times are so many times as long. `error` is the standard deviation of
    the logarithm of what remains. `source` says whose."""

    prefill: float = 1.0
    decode: float = 1.0
    prefill_error: float = factors.PREFILL_ERROR
    decode_error: float = factors.DECODE_ERROR
    source: str = ""

    def slower(self, deviations: float) -> Correction:
        """So many standard deviations slower; faster where negative."""
        return Correction(
            self.prefill * math.exp(deviations * self.prefill_error),
            self.decode * math.exp(deviations * self.decode_error),
            self.prefill_error,
            self.decode_error,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Of a step, seconds."""

    arithmetic: float = 0.0
    reading: float = 0.0
    talking: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        """Arithmetic and reading go on at once, the others do not."""
        return max(self.arithmetic, self.reading) + self.talking + self.overhead

    def plus(self, other: Part) -> Part:
        """Both, one after the other."""
        return Part(
            self.arithmetic + other.arithmetic,
            self.reading + other.reading,
            self.talking + other.talking,
            self.overhead + other.overhead,
        )

    @property
    def binding(self) -> str:
        """What takes longest of it."""
        shares = {
            "compute": self.arithmetic if self.arithmetic >= self.reading else 0.0,
            "memory bandwidth": self.reading if self.reading > self.arithmetic else 0.0,
            "interconnect": self.talking,
            "overhead": self.overhead,
        }
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class Rates:
    """One replica of a model in a layout on a machine. Times are of one data-parallel rank."""

    model: Model
    layout: Layout
    machine: Machine
    correction: Correction = field(default_factory=Correction)

    def refusal(self) -> str | None:
        """Why ranks cannot talk to each other, or cannot compute; None where they can."""
        if self.layout.gpus > 1 and self.machine.link(self.layout.gpus) is None:
            return f"nothing connects {self.layout.gpus} GPUs: {self.machine.node.name} has no fabric"
        if not self.machine.gpu.flops or not self.machine.gpu.memory_bandwidth:
            return (
                f"of {self.machine.gpu.name} neither arithmetic nor bandwidth is known; name a type of the catalogue"
            )
        return None

    def prefill_s(self, uncached: float, cached: float, chunk: int) -> float:
        """Of so many tokens behind so many that are in the cache, in chunks; without a request's fixed part."""
        return self.correction.prefill * self.prefill_part(uncached, cached, chunk).seconds

    def prefill_part(self, uncached: float, cached: float, chunk: int) -> Part:
        """What prefill is made of, before correction."""
        if uncached <= 0.0:
            return Part()
        chunks = max(1, math.ceil(uncached / chunk))
        tokens = uncached / chunks
        total = Part()
        for run in self._runs:
            pairs = self._pairs(run, uncached, cached)
            layer = self._layer(run, tokens, pairs / chunks, 0.0, prefill=True)
            count = run.count * chunks
            total = total.plus(Part(*(count * each for each in _values(layer))))
        last = self._head(1.0)
        return total.plus(
            Part(last.arithmetic, last.reading, last.talking, chunks * factors.STEP_S / 2 + self._hops_s)
        )

    def step_s(self, sequences: float, context: float) -> float:
        """One decode step of so many sequences with so much context on average."""
        return self.correction.decode * self.step_part(sequences, context).seconds

    def step_part(self, sequences: float, context: float) -> Part:
        """What a decode step is made of, before correction."""
        total = self._head(sequences)
        for run in self._runs:
            seen = min(context, run.attention.window) if run.attention.window else context
            layer = self._layer(run, sequences, sequences * seen, sequences * seen, prefill=False)
            total = total.plus(Part(*(run.count * each for each in _values(layer))))
        overhead = factors.STEP_S + sequences * factors.SEQUENCE_S + self._hops_s
        return total.plus(Part(overhead=overhead))

    def prefill_tokens_per_s(self, prompt: float, chunk: int) -> float:
        """Of all ranks of a replica together, while they do nothing else."""
        return self.layout.queues * prompt / self.prefill_s(prompt, 0.0, chunk)

    def traffic(self, tokens_per_s: float) -> float:
        """Bytes a second that one rank sends to others of its replica, for so many tokens a second of all its
        data-parallel ranks together, prefill and decode alike."""
        rate = 0.0
        width = self.model.width * 2.0
        for run in self._runs:
            moved = 2.0 * _reduced(self.layout.tp) * width
            if run.feed_forward.experts and self.layout.expert_parallel:
                moved += 2.0 * self._exchanged(run) * width
            rate += run.count * moved * tokens_per_s / self.layout.dp
        return rate + (tokens_per_s / self.layout.dp * width if self.layout.pp > 1 else 0.0)

    @cached_property
    def _runs(self) -> list[Layers]:
        """All stages: a token goes through them one after the other."""
        return alike(self.model.layers)

    @cached_property
    def _tp_link(self) -> Link | None:
        return self.machine.link(self.layout.tp) if self.layout.tp > 1 else None

    @cached_property
    def _all_link(self) -> Link | None:
        ranks = self.layout.tp * self.layout.dp
        return self.machine.link(ranks) if ranks > 1 else None

    @property
    def _hops_s(self) -> float:
        """From stage to stage."""
        link = self.machine.link(self.layout.gpus) if self.layout.pp > 1 else None
        return (self.layout.pp - 1) * link.latency_s if link else 0.0

    def _flops(self, format_: Format) -> float:
        """Of one GPU for numbers of a format: those that it does not multiply are turned into bf16."""
        flops = self.machine.gpu.flops
        return flops.get(format_.arithmetic) or flops.get("bf16") or max(flops.values())

    @property
    def _bandwidth(self) -> float:
        return factors.MEMORY * float(self.machine.gpu.memory_bandwidth)

    def _pairs(self, run: Layers, uncached: float, cached: float) -> float:
        """Pairs of tokens that attend to each other."""
        window = run.attention.window
        pairs = uncached * (cached + uncached / 2.0)
        return min(pairs, uncached * window) if window else pairs

    def _layer(self, run: Layers, tokens: float, pairs: float, read: float, *, prefill: bool) -> Part:
        """One layer on one rank: `read` are tokens of context whose KV is read from memory."""
        model, layout = self.model, self.layout
        attention, feed = run.attention, run.feed_forward
        ranks = layout.tp * layout.dp
        dense_share = factors.COMPUTE if prefill else factors.DECODE_COMPUTE
        expert_share = factors.EXPERT_COMPUTE if prefill else factors.DECODE_COMPUTE
        projections, keys, dense, _, router, _ = layer_tensors(run, model.width)
        arithmetic = 2.0 * tokens * (projections.divided / layout.tp + projections.whole + router.whole)
        arithmetic = arithmetic + 2.0 * tokens * keys.divided / min(layout.tp, attention.kv_heads)
        seconds = arithmetic / (dense_share * self._flops(attention.format))
        seconds += 2.0 * tokens * dense.divided / layout.tp / (dense_share * self._flops(dense.format))
        pair_flops = attention.pair_flops
        if attention.latent and not prefill:
            # Decoding absorbs the projections: heads attend in the latent space.
            pair_flops = 2.0 * attention.heads * (2 * attention.latent.rank + attention.latent.rope)
        # Attention multiplies in bf16 even where its cache is stored in fp8.
        seconds += pairs * pair_flops / layout.tp / (dense_share * self._flops(BF16))
        weights = layer_weights(model, run, layout)
        reading = weights.total - weights.experts
        if feed.experts:
            everywhere = tokens * layout.dp
            work = 2.0 * everywhere * feed.active * feed.expert(model.width).divided / ranks
            seconds += work / (expert_share * self._flops(feed.format))
            untouched = (1.0 - feed.active / feed.experts) ** everywhere
            reading += weights.experts * (1.0 - untouched)
        reading += read * kv_bytes(model, run, layout)
        talking = self._talking_s(run, tokens)
        overhead = factors.LAYER_S + (factors.EXPERT_LAYER_S if feed.experts else 0.0)
        return Part(seconds, reading / self._bandwidth, talking, overhead)

    def _talking_s(self, run: Layers, tokens: float) -> float:
        """Two all-reduces among the TP ranks; with data-parallel ranks, tokens go to the experts and back."""
        layout, message = self.layout, tokens * self.model.width * 2.0
        seconds = 0.0
        if link := self._tp_link:
            seconds += 2.0 * (link.latency_s + _reduced(layout.tp) * message / (factors.WIRE * link.rate))
        if run.feed_forward.experts and layout.dp > 1 and (link := self._all_link):
            moved = self._exchanged(run) if layout.expert_parallel else layout.dp - 1.0
            seconds += 2.0 * (link.latency_s + moved * message / (factors.WIRE * link.rate))
        return seconds

    def _exchanged(self, run: Layers) -> float:
        """How many other ranks a token goes to, on average."""
        ranks = self.layout.tp * self.layout.dp
        feed = run.feed_forward
        return (ranks - 1.0) * (1.0 - (1.0 - 1.0 / ranks) ** feed.active) / self.layout.tp

    def _head(self, tokens: float) -> Part:
        """The output projection of so many tokens."""
        parameters = self.model.vocabulary * self.model.width / self.layout.tp
        arithmetic = 2.0 * tokens * parameters / (factors.DECODE_COMPUTE * self._flops(self.model.head_format))
        reading = parameters * self.model.head_format.bytes / self._bandwidth
        link = self._tp_link
        talking = link.latency_s + tokens * self.model.vocabulary * 2.0 / link.rate if link else 0.0
        return Part(arithmetic, reading, talking)


def _reduced(ranks: int) -> float:
    return 2.0 * (ranks - 1) / ranks


def _values(part: Part) -> tuple[float, float, float, float]:
    return part.arithmetic, part.reading, part.talking, part.overhead
