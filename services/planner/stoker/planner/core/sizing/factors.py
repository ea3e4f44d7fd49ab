"""What no data sheet says: how much of a GPU an engine reaches, and what it keeps for itself.

Where nothing else is said, values were fitted to the measurements in `published`, each with source and date.
docs/sizing.md has the predictions that follow next to these, and the errors that remain: they are the error bars.
"""

from __future__ import annotations

# --- memory
UTILIZATION = 0.9
"""vLLM's default of `--gpu-memory-utilization`. Never 1: what other processes and fragments hold is not the engine's
(github.com/ai-dynamo/aiconfigurator, issue 1396)."""
LARGE_GPU_BYTES = 70e9
"""From so much memory on vLLM takes larger batches by default (A100 excepted); vllm/engine/arg_utils.py."""
SAMPLING_BYTES_PER_LOGIT = 36.0
"""Of the sampler's trial run, for each of `max_num_seqs` times the vocabulary; the published logs say 26 to 41."""
GRAPH_BYTES_PER_LAYER = 20e6
"""Of CUDA graphs: 14 MB (github.com/vllm-project/vllm, pull request 11349, 2024-12) to 21 MB (issue 20783, 2025-07).
vLLM itself counts them only if it is told to; here they are taken from its share, so that nothing runs short."""
CONTEXT_BYTES = 0.5e9
"""CUDA context and libraries, beyond PyTorch: 0.2 to 0.6 GB on one GPU."""
COMMUNICATOR_BYTES = 1.5e9
"""NCCL's buffers and those of custom all-reduce where there is more than one rank: 1.0 to 2.0 GB."""

# --- arithmetic
COMPUTE = 0.58
"""Share of the dense peak that prefill reaches in attention and dense layers, communication left out."""
EXPERT_COMPUTE = 0.30
"""The same in experts, whose matrices are smaller and whose loads differ."""
DECODE_COMPUTE = 0.45
"""The same in decoding, whose matrices are thin."""

# --- memory bandwidth
MEMORY = 0.75
"""Share of the peak at which weights and KV are read in decoding."""

# --- overheads
LAYER_S = 25e-6
"""Of a layer in one step, whatever it computes: kernels that wait for each other."""
EXPERT_LAYER_S = 20e-6
"""The same, on top, of a layer with experts: their choice, and tokens put in their order and back."""
STEP_S = 1.0e-3
"""Of a step: scheduling, sampling, the way to the host and back."""
SEQUENCE_S = 40e-6
"""Of a sequence in a step: its sampling, its text, its place in the next batch."""
REQUEST_S = 8e-3
"""Of a request before its first token: HTTP, tokenizing, its place in a batch."""

# --- communication
WIRE = 0.77
"""Share of a link's rate that all-reduce reaches with large messages: 366 GB/s between four H100
(waynehacking8.github.io, "Where tensor-parallel inference hits the NVLink wall", 2026-05)."""
NVLINK_S, PCIE_S, FABRIC_S = 20e-6, 40e-6, 45e-6
"""Time of an all-reduce of a few kilobytes, waiting for the slowest rank included. Those of PCIe and of the fabric
are assumed: twice as long and a little more."""

PREFILL_ERROR, DECODE_ERROR = 0.16, 0.22
"""Standard deviation of the logarithm of measured over predicted times, over the published measurements that
docs/sizing.md lists; a test keeps it so. A GPU, engine or model that is not among these may be further off."""
MEASURED_ERROR = 0.05
"""The least that is assumed of measured rates: days and machines differ."""
