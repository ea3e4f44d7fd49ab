"""`/metrics` of an engine, as values. Pure: Prometheus text in, `EngineLoad` and cache constants out."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from stoker.node_agent.engine.protocol import EngineLoad, Histogram

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Samples:
    """The samples of one scrape: name to (labels, value), in the order scraped."""

    by_name: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=lambda: defaultdict(list))

    def of_rank(self, rank: int) -> Samples:
        """Those of one data-parallel rank, which vLLM labels `engine`."""
        ours = Samples()
        for name, samples in self.by_name.items():
            if own := [sample for sample in samples if sample[0].get("engine") == str(rank)]:
                ours.by_name[name] = own
        return ours

    def total(self, name: str) -> float | None:
        """Sum over all label sets, or `None` if there is no sample."""
        samples = self.by_name.get(name)
        return sum(value for _, value in samples) if samples else None

    def mean(self, name: str) -> float | None:
        """Mean over all label sets, or `None` if there is no sample."""
        samples = self.by_name.get(name)
        return sum(value for _, value in samples) / len(samples) if samples else None

    def histogram(self, name: str) -> Histogram | None:
        """All label sets of a histogram merged, or `None` if it is not there."""
        total, count = self.total(f"{name}_sum"), self.total(f"{name}_count")
        if total is None or count is None:
            return None
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in self.by_name.get(f"{name}_bucket", ()):
            try:
                buckets[float(labels.get("le", ""))] += value
            except ValueError:
                continue
        return Histogram(total, count, tuple(sorted(buckets.items())))


def parse(text: str, prefix: str = "vllm:") -> Samples:
    """Read the samples whose names begin with `prefix`; lines that make no sense are skipped."""
    samples = Samples()
    for line in text.splitlines():
        if not line.startswith(prefix) or not (match := _SAMPLE.match(line)):
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        samples.by_name[name].append((dict(_LABEL.findall(labels or "")), number))
    return samples


def load(samples: Samples) -> EngineLoad:
    """What the samples say about load. What is missing, or not a number, stays unknown."""
    return EngineLoad(
        running=_whole(samples.total("vllm:num_requests_running")),
        waiting=_whole(samples.total("vllm:num_requests_waiting")),
        kv_cache_usage=_finite(samples.mean("vllm:kv_cache_usage_perc")),
        prefix_cache_queries=_finite(samples.total("vllm:prefix_cache_queries_total")),
        prefix_cache_hits=_finite(samples.total("vllm:prefix_cache_hits_total")),
        prompt_tokens=_finite(samples.total("vllm:prompt_tokens_total")),
        generation_tokens=_finite(samples.total("vllm:generation_tokens_total")),
        cached_prompt_tokens=_finite(samples.total("vllm:prompt_tokens_cached_total")),
        preemptions=_finite(samples.total("vllm:num_preemptions_total")),
        prefill_seconds=samples.histogram("vllm:request_prefill_time_seconds"),
        queue_seconds=samples.histogram("vllm:request_queue_time_seconds"),
        ttft_seconds=samples.histogram("vllm:time_to_first_token_seconds"),
        itl_seconds=samples.histogram("vllm:inter_token_latency_seconds"),
        e2e_seconds=samples.histogram("vllm:e2e_request_latency_seconds"),
    )


@dataclass(frozen=True)
class CacheConfig:
    """`vllm:cache_config_info`, whose values are all text."""

    block_size: int | None = None
    blocks: int | None = None
    """Over all data-parallel ranks: each of them tells the sum."""
    dtype: str | None = None
    prefix_caching: bool | None = None


def cache_config(samples: Samples) -> CacheConfig:
    """The KV cache's constants; unknown where the engine does not say."""
    infos = [labels for labels, _ in samples.by_name.get("vllm:cache_config_info", ())]
    if not infos:
        return CacheConfig()
    caching = infos[0].get("enable_prefix_caching")
    return CacheConfig(
        block_size=_integer(infos[0].get("block_size")),
        blocks=_integer(infos[0].get("num_gpu_blocks")),
        dtype=infos[0].get("cache_dtype"),
        prefix_caching=None if caching is None else caching == "True",
    )


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and value == value and abs(value) != float("inf") else None


def _whole(value: float | None) -> int | None:
    finite = _finite(value)
    return None if finite is None else int(finite)
