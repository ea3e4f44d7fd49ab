"""How one replica is cut over GPUs, and what each of them then holds of the weights.

As vLLM cuts: tensor parallelism (TP) by heads and by the feed-forward network's inner width; pipeline parallelism
(PP) by layers; data-parallel attention (DP), in models with experts, by requests, the experts being cut over all TP
times DP ranks: each expert by its width, or whole experts with expert parallelism (EP).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from stoker.planner.core.sizing.architecture import Layers, Model, Tensors

_PADDED_EXPERT_WIDTH = 256
"""To a multiple of so many columns vLLM pads experts in MXFP4: its log has gpt-oss-120b at 64.4 GiB where the files
have 60.8 (github.com/vllm-project/vllm, issue 33155)."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Ranks of one replica."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def queues(self) -> int:
        """Requests that can be worked on at once as if alone: one by each data-parallel rank and pipeline stage."""
        return self.pp * self.dp

    @property
    def name(self) -> str:
        """As "TP4 PP2", what is 1 left out."""
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return " ".join([*(parts or ["TP1"]), *(["EP"] if self.expert_parallel else [])])


@dataclass(frozen=True, slots=True)
class Weights:
    """What one GPU holds, bytes."""

    embeddings: float = 0.0
    attention: float = 0.0
    feed_forward: float = 0.0
    experts: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.embeddings + self.attention + self.feed_forward + self.experts + self.other

    def plus(self, other: Weights) -> Weights:
        """Both."""
        return Weights(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, factor: float) -> Weights:
        """So many times as much."""
        return Weights(*(factor * getattr(self, each.name) for each in fields(self)))


def refusal(model: Model, layout: Layout) -> str | None:
    """Why a model cannot be cut like this; None where it can."""
    tp, ranks = layout.tp, layout.tp * layout.dp
    if layout.pp > model.depth:
        return f"{layout.pp} stages for {model.depth} layers"
    if (layout.dp > 1 or layout.expert_parallel) and not model.experts:
        return "without experts, data-parallel ranks are replicas of their own"
    if layout.expert_parallel and (ranks == 1 or model.experts % ranks):
        return f"{model.experts} experts do not divide by {ranks}"
    for run in model.layers:
        attention, feed = run.attention, run.feed_forward
        if attention.heads % tp:
            return f"{attention.heads} heads do not divide by TP {tp}"
        if not attention.latent and attention.kv_heads % tp and tp % attention.kv_heads:
            return f"{attention.kv_heads} KV heads and TP {tp} do not divide each other"
        cut = 1 if feed.experts and layout.expert_parallel else ranks if feed.experts else tp
        if feed.inner % cut or (feed.experts and feed.shared % tp):
            return f"an inner width of {feed.inner} does not divide by {cut}"
        if feed.inner // cut % feed.format.block and cut > 1:
            return f"{feed.inner // cut} columns a rank are no multiple of the {feed.format.block} that share a scale"
    return None


def stages(model: Model, layout: Layout) -> list[list[Layers]]:
    """The layers of each pipeline stage, first stage first. As vLLM does, what does not divide goes to the stages
    before the last, which has the output projection."""
    layers = list(model.each_layer())
    least, more = divmod(len(layers), layout.pp)
    counts = [least] * layout.pp
    for place in range(more):
        counts[-2 - place if layout.pp > 1 else 0] += 1
    ends = [sum(counts[: place + 1]) for place in range(layout.pp)]
    return [alike(layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def weights(model: Model, layout: Layout) -> list[Weights]:
    """What one GPU of each stage holds."""
    scale = model.weight_scale
    found = []
    for place, runs in enumerate(stages(model, layout)):
        held = Weights()
        for run in runs:
            held = held.plus(layer_weights(model, run, layout).times(run.count))
        first, last = place == 0, place == layout.pp - 1
        if first:
            held = held.plus(Weights(embeddings=_held(model.embedding, layout.tp), other=model.beside.bytes))
        if last:
            head = model.head if not model.tied or first else model.embedding
            held = held.plus(Weights(embeddings=_held(head, layout.tp)))
        found.append(held.times(scale))
    return found


def layer_weights(model: Model, run: Layers, layout: Layout) -> Weights:
    """What one GPU holds of one layer of a run, by the counted shapes."""
    attention, feed, width = run.attention, run.feed_forward, model.width
    ranks = layout.tp * layout.dp
    kv_cut = 1 if attention.latent else min(layout.tp, attention.kv_heads)
    expert = feed.expert(width).bytes * _padding(run, layout)
    each = feed.experts / ranks
    return Weights(
        attention=_held(attention.queries_and_output(width), layout.tp)
        + _held(attention.keys_and_values(width), kv_cut),
        feed_forward=_held(feed.dense(width), layout.tp),
        experts=expert * each,
        other=_held(feed.router(width), 1) + run.norms * width * 2.0,
    )


def kv_bytes(model: Model, run: Layers, layout: Layout) -> float:
    """What one GPU keeps of one token in one layer of a run. KV heads are copied where there are fewer than TP ranks;
    what MLA caches is on every rank."""
    attention = run.attention
    values = float(attention.kv_values)
    if not attention.latent:
        values = values / min(layout.tp, attention.kv_heads)
    return values * model.kv_format.bytes


def _padding(run: Layers, layout: Layout) -> float:
    feed = run.feed_forward
    if feed.format.name != "mxfp4" or not feed.experts:
        return 1.0
    own = feed.inner / (1 if layout.expert_parallel else layout.tp * layout.dp)
    return math.ceil(own / _PADDED_EXPERT_WIDTH) * _PADDED_EXPERT_WIDTH / own


def _held(tensors: Tensors, cut: int) -> float:
    return (tensors.divided / cut + tensors.whole) * tensors.format.bytes


def alike(layers: Sequence[Layers]) -> list[Layers]:
    """Layers that are alike, wherever they are, together: here their order says nothing any more."""
    found: dict[Layers, int] = {}
    for layer in layers:
        found[layer] = found.get(layer, 0) + layer.count
    return [Layers(count, run.attention, run.feed_forward, run.norms) for run, count in found.items()]
