"""`/metrics` under vLLM's names, and with its labels and buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """A cumulative histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        """Its samples in the text format."""
        lines, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [f"# TYPE {name} histogram", *lines, f"{name}_count{{{labels}}} {float(total)}",
                f"{name}_sum{{{labels}}} {self._sum}"]  # fmt: skip


class Metrics:
    """Counters and histograms of one engine."""

    def __init__(self, model_name: str, rank: int = 0) -> None:
        self._rank = rank
        self._labels = f'engine="{rank}",model_name="{model_name}"'
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}
        self.ttft = Histogram(_TTFT)
        self.itl = Histogram(_ITL)
        self.e2e = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self.inference = Histogram(_REQUEST)

    def render(self, gauges: Mapping[str, float], counters: Mapping[str, float], cache: Mapping[str, object]) -> str:
        """The whole page. `gauges` and `counters` come from the scheduler, `cache` are the cache's constants."""
        totals = {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.cached_tokens,
            "generation_tokens": self.generation_tokens,
            **counters,
        }
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{self._labels}}} {float(value)}"]
        for name, value in totals.items():
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{self._labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in (
            ("time_to_first_token_seconds", self.ttft),
            ("inter_token_latency_seconds", self.itl),
            ("e2e_request_latency_seconds", self.e2e),
            ("request_queue_time_seconds", self.queue),
            ("request_inference_time_seconds", self.inference),
            ("request_prefill_time_seconds", self.prefill),
            ("request_decode_time_seconds", self.decode),
        ):
            lines += histogram.lines(f"vllm:{name}", self._labels)
        info = ",".join(f'{name}="{value}"' for name, value in cache.items())
        lines += [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{{info},engine="{self._rank}"}} 1.0',
        ]
        return "\n".join(lines) + "\n"
