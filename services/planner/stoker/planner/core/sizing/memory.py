"""What fills one GPU's memory, term by term, and how much KV cache is left.

vLLM takes a share of the GPU (`--gpu-memory-utilization`, 0.9 by default), loads the weights, measures by a trial run
what else a step needs at most, and gives all the rest of the share to KV blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.planner.core.facility.values import GpuType
from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.architecture import Layers, Model
from stoker.planner.core.sizing.layout import Layout, Weights, kv_bytes, stages, weights


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of vLLM that sizes depend on.

    `hybrid` is its hybrid KV cache manager: without it, layers with a window keep as much as those without.
    """

    utilization: float = factors.UTILIZATION
    block_size: int = 16
    batched_tokens: int = 8_192
    max_seqs: int = 1_024
    hybrid: bool = True

    @classmethod
    def on(cls, gpu: GpuType) -> Engine:
        """vLLM's defaults on such a GPU when it serves."""
        large = gpu.memory >= factors.LARGE_GPU_BYTES and "a100" not in gpu.name.lower()
        return cls() if large else cls(batched_tokens=2_048, max_seqs=256)


@dataclass(frozen=True, slots=True)
class Memory:
    """One GPU of the stage that has the least room for KV, in bytes; the terms add up to `total`.

    `kv` is negative where the rest does not fit. `blocks` are those that vLLM counts, `tokens` what they hold if all
    layers looked back without limit, summed over data-parallel ranks: vLLM's "GPU KV cache size".
    """

    total: float
    unused: float
    weights: Weights
    activations: float
    graphs: float
    non_torch: float
    kv: float
    blocks: int
    tokens: int
    sequences: dict[int, float]
    """How many sequences of a length fit at once in the replica."""

    @property
    def fits(self) -> bool:
        """Whether there is room for any KV."""
        return self.blocks > 0

    @property
    def terms(self) -> dict[str, float]:
        """All terms, in the order in which they are taken."""
        return {
            "outside_utilization_share": self.unused,
            "weights_embeddings": self.weights.embeddings,
            "weights_attention": self.weights.attention,
            "weights_feed_forward": self.weights.feed_forward,
            "weights_experts": self.weights.experts,
            "weights_other": self.weights.other,
            "activation_peak": self.activations,
            "cuda_graphs": self.graphs,
            "non_torch": self.non_torch,
            "kv_cache": self.kv,
        }

    @property
    def missing(self) -> float:
        """Bytes by which it does not fit, 0 where it does."""
        return max(0.0, -self.kv)


def memory(model: Model, layout: Layout, gpu: GpuType, engine: Engine, lengths: Sequence[int] = ()) -> Memory:
    """How a GPU's memory is used, with the number of sequences of each of `lengths` that fit at once."""
    parts = stages(model, layout)
    each = [
        _stage(model, layout, gpu, engine, held, runs)
        for held, runs in zip(weights(model, layout), parts, strict=True)
    ]
    # Every stage keeps a part of every sequence: the one that has room for the fewest tokens decides.
    least = min(each, key=lambda stage: (stage.tokens, stage.kv))
    fitting = {
        length: layout.dp
        * min(
            max(0.0, stage.kv) / sequence_bytes(model, layout, engine, length, runs)
            for stage, runs in zip(each, parts, strict=True)
        )
        for length in lengths
    }
    return replace(least, tokens=layout.dp * least.tokens, sequences=fitting)


def sequence_bytes(model: Model, layout: Layout, engine: Engine, tokens: float, runs: Sequence[Layers]) -> float:
    """KV of one sequence of so many tokens in one GPU's layers, in whole blocks.

    With the hybrid manager a layer with a window keeps its window, and a block more as it slides; layers are managed
    in groups of as many as there are of the rarer kind, and what a group lacks is kept too.
    """
    block = engine.block_size
    whole = math.ceil(tokens / block) * block
    full = sum(run.count for run in runs if not run.attention.window)
    total = 0.0
    for run in runs:
        window = run.attention.window
        kept, count = float(whole), float(run.count)
        if window and (engine.hybrid or not full):
            kept = min(kept, (math.ceil(window / block) + 1.0) * block)
            if full:
                group = min(full, run.count)
                count = math.ceil(run.count / group) * group
        total += count * kept * kv_bytes(model, run, layout)
    return total


def _stage(
    model: Model, layout: Layout, gpu: GpuType, engine: Engine, held: Weights, runs: Sequence[Layers]
) -> Memory:
    total = float(gpu.memory)
    share = engine.utilization * total
    activations = _activations(model, layout, engine, runs)
    graphs = factors.GRAPH_BYTES_PER_LAYER * sum(run.count for run in runs)
    non_torch = factors.CONTEXT_BYTES + (factors.COMMUNICATOR_BYTES if layout.gpus > 1 else 0.0)
    kv = share - held.total - activations - graphs - non_torch
    per_token = sum(run.count * kv_bytes(model, run, layout) for run in runs)
    blocks = max(0, math.floor(kv / (per_token * engine.block_size)))
    return Memory(
        total, total - share, held, activations, graphs, non_torch, kv, blocks, blocks * engine.block_size, {}
    )


def _activations(model: Model, layout: Layout, engine: Engine, runs: Sequence[Layers]) -> float:
    """The larger of a step's widest layer and of sampling for as many sequences as may be: they follow each other."""
    sampling = engine.max_seqs * model.vocabulary * factors.SAMPLING_BYTES_PER_LOGIT
    widest = 0.0
    for run in runs:
        attention, feed = run.attention, run.feed_forward
        heads = (2 * attention.heads + 2 * attention.kv_heads) * attention.head / layout.tp
        inner = (feed.matrices * (feed.shared if feed.experts else feed.inner)) / layout.tp
        if feed.experts:
            cut = 1 if layout.expert_parallel else layout.tp * layout.dp
            # Under expert parallelism a rank gets the tokens of others that chose its experts: on average as many.
            inner += feed.active * (feed.matrices * feed.inner / cut + model.width)
        widest = max(widest, heads, inner)
    forward = engine.batched_tokens * 2.0 * (4 * model.width + widest)
    return max(sampling, forward)
