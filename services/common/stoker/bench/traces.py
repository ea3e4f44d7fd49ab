"""Jobs for `stoker.bench.replay`: from a workload's text, and generated. `published` reads those of others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import xxhash

from stoker.bench.replay import Job
from stoker.bench.workloads import WORDS, Prompt
from stoker.common.blocks import block_keys, root_key

_BLOCK = 512


def numbered_key(number: int) -> int:
    """A block's key, u64, made of a number that stands for the block."""
    key: int = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"))
    return key


def common_prefix_trace(
    seed: int,
    *,
    conversations: int = 700,
    common_blocks: int = 8,
    seconds: float = 1_000.0,
    pause_s: float = 60.0,
) -> list[Job]:
    """Conversations that all begin with the same blocks: one long system prompt.

    A third brings a long document of its own; each has one to ten turns, exponential pauses between them,
    and each turn adds a few blocks. Sizes and rates are of the order of the Mooncake trace.
    """
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    names = iter(range(1, 2**62))
    common = [numbered_key(next(names)) for _ in range(common_blocks)]
    jobs = []
    for _ in range(conversations):
        at = rng.random() * seconds
        keys = list(common)
        if rng.random() < 0.33:
            keys += [numbered_key(next(names)) for _ in range(rng.randint(20, 120))]
        for _ in range(rng.randint(1, 10)):
            keys += [numbered_key(next(names)) for _ in range(rng.randint(1, 6))]
            jobs.append(Job(at, tuple(keys), len(keys) * _BLOCK))
            at += 2.0 + rng.expovariate(1.0 / pause_s)
    return sorted(jobs, key=lambda job: job.at)


def workload_jobs(prompts: Sequence[Prompt], block_size: int = 32) -> list[Job]:
    """Turn a workload's text into jobs, one token a word; chat messages follow each other."""
    ids = {word: number for number, word in enumerate(WORDS)}
    root = root_key("replay")
    jobs = []
    for prompt in prompts:
        text = prompt.text or " ".join(content for _, content in prompt.messages)
        tokens = [ids[word] for word in text.split()]
        keys = tuple(block_keys(tokens, block_size, root))
        jobs.append(Job(0.0, keys, len(tokens), prompt.max_tokens, prompt.after, tenant=prompt.tenant))
    return jobs


def tenants_trace(
    seed: int,
    *,
    tenants: int = 10,
    documents: int = 13,
    document_blocks: int = 90,
    over: float = 0.8,
    over_at: float = 900.0,
    busy_s: float = 120.0,
    rare_s: float = 600.0,
    seconds: float = 2_100.0,
) -> list[Job]:
    """Tenants that differ in liveliness, each with a system prompt and documents that its users ask about.

    A share `over` of them asks about each of its documents every `busy_s` and has said its last word by
    `over_at`; the others come back to each of theirs every `rare_s`, all the time. The times vary by a tenth.
    What lies where follows the routing: a tenant's documents tend to lie together, as their beginning is one.
    Nothing is generated; `simulate.loads.tenants` has conversations that grow and are answered.
    """
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    names = iter(range(1, 2**62))
    jobs = []
    for number in rng.sample(range(tenants), tenants):
        ends = number < over * tenants
        every, until = (busy_s, over_at) if ends else (rare_s, seconds)
        system = [numbered_key(next(names)) for _ in range(12)]
        for _ in range(documents):
            keys = system + [numbered_key(next(names)) for _ in range(document_blocks)]
            at = rng.random() * min(every, over_at / 4)
            while at < until:
                asked = tuple(keys + [numbered_key(next(names)) for _ in range(rng.randint(1, 2))])
                jobs.append(Job(at, asked, len(asked) * _BLOCK, tenant=f"tenant-{number}"))
                at += every * rng.uniform(0.9, 1.1)
    return sorted(jobs, key=lambda job: job.at)
