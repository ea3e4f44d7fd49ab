"""What others measured and published: the constants of `factors` come from these, and are judged by them.

`python bench/sizing.py` prints predictions beside them; a test keeps the errors as docs/sizing.md states them.
"""

from __future__ import annotations

from typing import NamedTuple

from stoker.planner.core.sizing.factors import REQUEST_S
from stoker.planner.core.sizing.layout import Layout
from stoker.planner.core.sizing.measured import Measured
from stoker.simulate.hardware import DECODE_64_S, DECODE_S, LLM_D_TOKENS_PER_S

MS = 1e-3


class Published(NamedTuple):
    """A measurement, and where it was published, by engine and date."""

    measured: Measured
    source: str
    engine: str
    date: str


class Logged(NamedTuple):
    """What vLLM said of its memory, GiB of one GPU: weights as loaded, and what was left for KV. `tokens` is the
    "GPU KV cache size", 0 where the log is cut. `gpu_gib` is what CUDA reports."""

    model: str
    gpu: str
    gpu_gib: float
    layout: Layout
    utilization: float
    batched_tokens: int
    max_seqs: int
    weights_gib: float | None
    kv_gib: float
    tokens: int
    source: str
    date: str


_NIM = ("docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance, version 1.8.0", "TensorRT-LLM", "2025-04")
_DLI = ("github.com/wbing520/ai-performance-engineering, dataset/nim.csv", "TensorRT-LLM", "2024-06")
_CI = ("buildkite.com/vllm/performance-benchmark/builds/9515", "vLLM", "2024-11")
_INFERENCEX = ("github.com/SemiAnalysisAI/InferenceX, issue 870", "SGLang", "2026-03")
A100, H100, H200 = "a100-sxm-80gb", "h100-sxm", "h200-sxm"


def _prefill(
    model: str, gpu: str, tp: int, tokens: float, ms: float, said: tuple[str, str, str], *, alone: bool = True
) -> Published:
    """`alone` times are TTFT of a client with one request at a time, a request's fixed part included."""
    seconds = ms * MS - (REQUEST_S if alone else 0.0)
    return Published(Measured(gpu, Layout(tp), seconds, tokens=tokens, model=model), *said)


def _step(
    model: str,
    gpu: str,
    tp: int,
    at: tuple[float, float],
    ms: float,
    said: tuple[str, str, str],
    beside: tuple[float, float] = (0.0, 0.0),
) -> Published:
    """`at` are sequences and their context; `beside` are prefills per second and their tokens."""
    (sequences, context), (rate, tokens) = at, beside
    measured = Measured(
        gpu,
        Layout(tp),
        ms * MS,
        tokens=tokens,
        sequences=sequences,
        context=context,
        prefills_per_s=rate,
        model=model,
    )
    return Published(measured, *said)


_LLM_D = ("github.com/llm-d/llm-d, pull request 2071", "vLLM", "2026")
_QWQ = ("github.com/vllm-project/vllm, issue 18725", "vLLM", "2025-05")
_OSS = ("github.com/vllm-project/vllm, issue 22331", "vLLM", "2025-08")
_ORACLE = ("docs.oracle.com, benchmark of Llama-3.3-70B", "engine not known", "2025")

RATES: tuple[Published, ...] = (
    _prefill("llama-3.1-70b", A100, 4, 200, 66.65, _DLI),
    _prefill("llama-3.1-70b", A100, 4, 2_000, 397.4, _DLI),
    _prefill("llama-3.1-70b", H100, 8, 200, 29.71, _DLI),
    _prefill("llama-3.1-70b", H100, 8, 2_000, 112.97, _DLI),
    _prefill("llama-3.1-8b", A100, 2, 200, 21.43, _DLI),
    _prefill("llama-3.1-8b", A100, 2, 2_000, 91.38, _DLI),
    _prefill("llama-3.1-8b", A100, 2, 7_000, 319.86, _DLI),
    _prefill("llama-3.3-70b-fp8", H100, 2, 500, 47.77, _NIM),
    _prefill("llama-3.3-70b-fp8", H100, 2, 5_000, 406.77, _NIM),
    _prefill("qwen3-32b", H100, 2, 8_192, 8_192 / LLM_D_TOKENS_PER_S / MS, _LLM_D, alone=False),
    _step("llama-3.1-70b", A100, 4, (1, 300), 29.86, _DLI),
    _step("llama-3.1-70b", A100, 4, (25, 300), 34.68, _DLI, (3.19, 200)),
    _step("llama-3.1-70b", A100, 4, (50, 300), 37.97, _DLI, (5.46, 200)),
    _step("llama-3.1-70b", A100, 4, (1, 2_100), 31.61, _DLI),
    _step("llama-3.1-70b", H100, 8, (1, 700), 14.62, _DLI),
    _step("llama-3.1-70b", H100, 8, (25, 700), 17.26, _DLI, (1.43, 200)),
    _step("llama-3.1-70b", H100, 8, (50, 700), 20.05, _DLI, (2.45, 200)),
    _step("llama-3.1-70b", H100, 8, (100, 700), 23.19, _DLI, (4.2, 200)),
    _step("llama-3.1-70b", H100, 8, (250, 700), 33.13, _DLI, (7.19, 200)),
    _step("llama-3.1-70b", H100, 8, (1, 3_000), 16.01, _DLI),
    _step("llama-3.1-70b", H100, 8, (50, 3_000), 23.52, _DLI, (1.0, 2_000)),
    _step("llama-3.1-8b", A100, 2, (1, 700), 8.33, _DLI),
    _step("llama-3.1-8b", A100, 2, (50, 700), 12.79, _DLI, (3.82, 200)),
    _step("llama-3.1-8b", A100, 2, (100, 700), 19.99, _DLI, (4.9, 200)),
    _step("llama-3.1-8b", A100, 2, (1, 3_000), 9.24, _DLI),
    _step("llama-3.1-8b", A100, 2, (1, 7_500), 10.99, _DLI),
    _step("llama-3.3-70b-fp8", H100, 2, (1, 1_500), 18.91, _NIM),
    _step("llama-3.3-70b-fp8", H100, 2, (1, 5_250), 18.58, _NIM),
    _step("llama-3.3-70b-fp8", H100, 2, (5, 5_250), 21.83, _NIM, (0.437, 5_000)),
    _step("llama-3.3-70b-fp8", H100, 2, (25, 5_250), 38.75, _NIM, (1.247, 5_000)),
    _step("llama-3.3-70b-fp8", H100, 2, (50, 5_250), 59.73, _NIM, (1.629, 5_000)),
    _step("llama-3.1-70b", H100, 8, (1, 700), DECODE_S / MS, _ORACLE),
    _step("llama-3.1-70b", H100, 8, (64, 700), DECODE_64_S / MS, _ORACLE),
    _step("llama-3.1-70b", H200, 4, (8, 96), 2_077.5 / 128, _CI),
    _step("llama-3.1-8b", H200, 1, (8, 96), 833.4 / 128, _CI),
    _step("mixtral-8x7b", H200, 2, (8, 96), 1_917.4 / 128, _CI),
    _step("qwen3-32b", H200, 8, (1, 300), 6.70, _QWQ),
    _step("gpt-oss-120b", A100, 1, (1, 500), 1_000 / 89, _OSS),
    _step("deepseek-v3", H200, 8, (8, 1_536), 12.8, _INFERENCEX, (0.58, 1_024)),
    _step("deepseek-v3", H200, 8, (16, 1_536), 17.2, _INFERENCEX, (0.87, 1_024)),
    _step("deepseek-v3", H200, 8, (32, 1_536), 25.6, _INFERENCEX, (1.18, 1_024)),
    _step("deepseek-v3", H200, 8, (64, 1_536), 34.6, _INFERENCEX, (1.75, 1_024)),
)
"""Llama-3-8B and -70B count as Llama-3.1 of the same shape, QwQ-32B as Qwen3-32B, Llama-3.3-70B as Llama-3.1-70B."""

_VLLM = "github.com/vllm-project/vllm"

MEMORY: tuple[Logged, ...] = (
    Logged(
        *("llama-3.1-8b", H100, 79.22, Layout(1), 0.9, 8_192, 256, 14.96, 53.29, 0),
        *(f"{_VLLM}, pull request 10511", "2024-12"),
    ),
    Logged(
        *("gpt-oss-120b", H100, 79.19, Layout(1), 0.9, 8_192, 1_024, 65.97, -2.14, 0),
        *(f"{_VLLM}, issue 23278", "2025-08"),
    ),
    Logged(
        *("gpt-oss-120b", H100, 79.19, Layout(1), 0.95, 1_024, 1_024, None, 1.71, 0),
        *(f"{_VLLM}, issue 27508", "2025-10"),
    ),
    Logged(
        *("qwen3-235b-a22b-fp8", H100, 79.19, Layout(4), 0.9, 8_192, 1_024, None, 8.11, 178_880),
        *(f"{_VLLM}, issue 21348", "2025-07"),
    ),
    Logged(
        *("gpt-oss-20b", A100, 79.25, Layout(1), 0.65, 2_048, 256, 13.72, 36.56, 0),
        *("myoceane.fr/index.php/ai-vllm-a100-gemma-4", "2026-04"),
    ),
)
