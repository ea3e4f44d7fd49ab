"""What one LRU cache as large as all engines' together would hit: the yardstick beside which hit rates are read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.bench.cache import Cache
from stoker.bench.routing import Bench, prompts_of, tokens_per_word
from stoker.bench.workloads import Prompt
from stoker.common import rpc
from stoker.common.blocks import block_keys, root_key
from stoker.common.errors import StokerError

_INFO = "vllm:cache_config"
_AT_ONCE = 8
_CALL_S = 60.0


async def pooled_hit_rate(bench: Bench, workload: str, *, seed: int, rounds: int) -> float:
    """The median over rounds of the hit rate in tokens, requests in the order of the workload.

    Tokens, templates included, are those of the served model. Raises StokerError where engines do not say how large
    their caches are.
    """
    per_word = await tokens_per_word(bench)
    sizes = [await _cache_size(url) for url in bench.engines]
    block_size, blocks = sizes[0][0], sum(count for _, count in sizes)
    rates = []
    for number in range(seed, seed + rounds):
        prompts = await _tokenized(bench, prompts_of(bench, workload, number, per_word))
        rates.append(hit_rate(prompts, block_size, blocks))
    return median(rates)


def hit_rate(prompts: Sequence[Sequence[int]], block_size: int, blocks: int) -> float:
    """Tokens found by tokens asked, of prompts given as token ids, in one LRU cache of so many blocks."""
    root, cache, found = root_key("pooled"), Cache(blocks), 0
    for tokens in prompts:
        keys = block_keys(list(tokens), block_size, root)
        # An engine computes a prompt's last token whatever it holds, and with it the block that ends there.
        found += min(cache.hit(keys), (len(tokens) - 1) // block_size)
        cache.take(keys)
        cache.free(keys)
    return found * block_size / max(1, sum(map(len, prompts)))


async def _tokenized(bench: Bench, prompts: Sequence[Prompt]) -> list[list[int]]:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with rpc.channel(bench.routers[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def tokens(prompt: Prompt) -> list[int]:
            async with gate:
                answer = await stub.Tokenize(_request(bench.model, prompt), timeout=_CALL_S)
            return list(answer.token_ids)

        return list(await asyncio.gather(*(tokens(prompt) for prompt in prompts)))


def _request(model: str, prompt: Prompt) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(model=model)
    if not prompt.messages:
        request.text = prompt.text
    for role, content in prompt.messages:
        part = inference_pb2.ContentPart(text=content)
        request.chat.messages.append(inference_pb2.ChatMessage(role=role, content=[part]))
    return request


async def _cache_size(url: str) -> tuple[int, int]:
    """Tokens of a block, and blocks, of one engine."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.get(f"{url}/metrics") as answer,
    ):
        text = await answer.text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith(_INFO) else ():
            size, count = sample.labels.get("block_size", ""), sample.labels.get("num_gpu_blocks", "")
            if size.isdigit() and count.isdigit():
                return int(size), int(count)
    raise StokerError(
        f"{url}/metrics has no {_INFO}_info with block_size and num_gpu_blocks", reason="NO_CACHE_COUNTERS"
    )
