"""What one simulated replica can do, from published figures: Llama-3.1-70B on a number of H100.

Where a source leaves room, computing is taken at its fastest and decoding at its slowest.
"""

from __future__ import annotations

from stoker.bench.replicas import Hardware

# --- the model: arXiv:2407.21783 (The Llama 3 Herd of Models), table 3; weights and KV in bfloat16
PARAMETERS = 70.6e9
LAYERS, WIDTH, KV_HEADS, HEAD = 80, 8_192, 8, 128
WEIGHT_BYTES = 2 * PARAMETERS
KV_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD  # a token's keys and values: 320 KiB

# --- one GPU: NVIDIA's H100 SXM data sheet (dense bfloat16, HBM3)
FLOPS, MEMORY_BYTES, BANDWIDTH = 989e12, 80e9, 3.35e12
USED = 0.9  # vLLM's default gpu_memory_utilization
SPARE_BYTES = 2e9  # activations and CUDA graphs; assumed
# The share of FLOPS that vLLM reaches in prefill: llm-d measured 15,926 tokens/s of Qwen3-32B (32.8e9 parameters)
# on two H100 (github.com/llm-d/llm-d, pull request 2071). More lose more to communication: this is the best case.
LLM_D_TOKENS_PER_S = 15_926
PREFILL_SHARE = LLM_D_TOKENS_PER_S * 2 * 32.8e9 / (2 * FLOPS)
# Oracle's published benchmark of Llama-3.3-70B on eight (docs.oracle.com, "Benchmark: Meta Llama 3.3 (70B)", prompts
# of about 480 tokens): 58.64 tokens/s of one stream, 35.74 of each of 64; TTFT 0.05 s.
ORACLE_GPUS = 8
DECODE_S, DECODE_64_S = 1 / 58.64, 1 / 35.74
SEQUENCE_S = (DECODE_64_S - DECODE_S) / 63
TTFT_S, TTFT_TOKENS = 0.05, 480


def llama_70b(gpus: int, *, block_size: int, chunk_tokens: int, max_seqs: int = 0) -> Hardware:
    """A replica of Llama-3.1-70B on so many H100, by tensor parallelism.

    With fewer than the eight of the decoding benchmark a step takes longer, by what reading the weights does.
    """
    flops, bandwidth = gpus * FLOPS, gpus * BANDWIDTH
    reading_s = WEIGHT_BYTES / bandwidth - WEIGHT_BYTES / (ORACLE_GPUS * BANDWIDTH)
    free_bytes = gpus * (USED * MEMORY_BYTES - SPARE_BYTES) - WEIGHT_BYTES
    return Hardware(
        block_size=block_size,
        kv_blocks=int(free_bytes / KV_BYTES / block_size),
        prefill_rate=PREFILL_SHARE * flops / (2 * PARAMETERS),
        attended_s=4 * LAYERS * WIDTH / (PREFILL_SHARE * flops),  # QKᵀ and AV: four FLOP for each pair and channel
        request_s=TTFT_S - TTFT_TOKENS * 2 * PARAMETERS / (PREFILL_SHARE * ORACLE_GPUS * FLOPS) - DECODE_S,
        decode_s=DECODE_S + reading_s,
        sequence_s=SEQUENCE_S,
        context_s=KV_BYTES / bandwidth,
        batching=True,
        chunk_tokens=chunk_tokens,
        max_seqs=max_seqs,
    )


DEFAULT = llama_70b(4, block_size=512, chunk_tokens=2_048, max_seqs=256)
"""Four H100; chunks as operators set them who care for ITL; blocks as in the Mooncake trace."""
