"""A sizing answer under a made load in simulated time: the real router, replicas that compute as the roofline says.

The queueing model behind an answer knows no router, no chunks, no blocks; the simulation does. Where both agree, the
answer does not hang on what the formula leaves out. Both take rates from the same roofline: whether that is right,
only measurement tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from stoker.bench.replicas import Hardware, Job
from stoker.bench.traces import numbered_key
from stoker.common.errors import InvalidRequest
from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.search import Plan, Pool
from stoker.planner.core.sizing.workload import Role, Workload
from stoker.simulate.ledger import Ledger
from stoker.simulate.policies import parsed
from stoker.simulate.run import simulate
from stoker.simulate.settings import Objective, Settings, Starting

BLOCK = 128
"""Tokens of a simulated block: long ones make it fast."""
_REQUESTS, _MOST_REQUESTS = 3_000, 100_000
_SHORTEST_S, _USUAL_S, _LONGEST_S = 60.0, 300.0, 100_000.0
_FEWEST_PER_S = 0.01
_PREFIXES = 2
"""Shared prefixes for each replica, where some of the prompts' tokens are found in caches."""
_ANY_S = 1e6
_MANY_TOKENS_PER_S = 1e12


@dataclass(frozen=True, slots=True)
class Checked:
    """One pool with so many replicas: the share of requests within the SLO, of those that this pool can make late."""

    role: Role
    replicas: int
    attainment: float
    needed: float
    ttft_ms: float | None
    itl_ms: float | None

    @property
    def holds(self) -> bool:
        """Whether as many requests as shall are within it."""
        return self.attainment >= self.needed


def check(plan: Plan, *, seed: int = 1, said: Callable[[str], None] = lambda text: None) -> list[Checked]:
    """Each pool as it is answered, then with one replica fewer.

    Raises InvalidRequest where a minute of the load is more than can be simulated, or a day of it is hardly anything.
    """
    if plan.workload.requests_per_s < _FEWEST_PER_S:
        raise InvalidRequest.field(
            "--check", f"below {_FEWEST_PER_S:g} requests/s is not simulated: hardly two of them meet; leave it out"
        )
    if plan.workload.requests_per_s * _SHORTEST_S > _MOST_REQUESTS:
        most = _MOST_REQUESTS / _SHORTEST_S
        raise InvalidRequest.field(
            "--check", f"above {most:,.0f} requests/s is not simulated; check a part of the load"
        )
    found = []
    for pool in plan.pools:
        for replicas in (pool.replicas, pool.replicas - 1):
            if replicas:
                said(f"simulating {replicas} × {pool.layout.name} ({pool.role.value})")
                found.append(replay(pool, replicas, seed=seed, requests=_REQUESTS))
    return found


def replay(pool: Pool, replicas: int, *, seed: int, requests: int) -> Checked:
    """So many replicas of a pool under its workload. Each data-parallel rank and each pipeline stage is simulated as
    a replica of its own, as each has its own queue."""
    serving, queues = pool.serving, replicas * pool.layout.queues
    workload, slo, role = serving.workload, serving.slo, pool.role
    objective = Objective(
        # A decode replica without room makes a first token late, too.
        slo.ttft_s / 2.0 if role is Role.DECODE else max(1e-6, slo.ttft_s - serving.transfer_s - factors.REQUEST_S),
        None if role is Role.PREFILL else slo.itl_s,
    )
    usual_s = max(_USUAL_S, requests / workload.requests_per_s)
    seconds = min(usual_s, _MOST_REQUESTS / workload.requests_per_s, _LONGEST_S)
    settings = Settings(
        hardware=hardware_of(pool, replicas),
        objective=objective,
        starting=Starting(0.0),
        least=queues,
        most=queues,
        initial=queues,
        queue=100_000,
        longest_s=_ANY_S,
        seed=seed,
    )

    def jobs() -> Iterator[Job]:
        return _jobs(workload, role, seconds, seed, _PREFIXES * queues)

    run = simulate(jobs, parsed(f"fixed:{queues}", objective), settings, said=_quiet)
    shown = run.figures
    return Checked(
        role, replicas, shown.attainment or 0.0, 1.0 - serving.may_miss, shown.ttft_p95_ms, shown.itl_p95_ms
    )


def hardware_of(pool: Pool, replicas: int) -> Hardware:
    """One queue of a replica as the simulator speaks of it: the roofline, straightened around where it works."""
    serving = pool.serving
    rates, workload, chunk = serving.rates, serving.workload, serving.engine.batched_tokens
    context, sequences = workload.context, max(1.0, serving.state(replicas).sequences)
    if pool.role is Role.PREFILL:
        sequences = 1.0
    elif not math.isfinite(sequences):
        sequences = max(1.0, serving.room)
    at, more, longer = (
        rates.step_s(sequences, context),
        rates.step_s(1.25 * sequences, context),
        rates.step_s(sequences, 1.25 * context),
    )
    context_s = max(0.0, (longer - at) / (0.25 * context * sequences))
    sequence_s = max(0.0, (more - at) / (0.25 * sequences) - context * context_s)
    decode_s = max(1e-6, at - sequences * (sequence_s + context * context_s))
    prefill_rate, attended_s = _prefill(pool, chunk)
    kept = next(iter(serving.memory.sequences.values())) / pool.layout.queues
    return Hardware(
        block_size=BLOCK,
        kv_blocks=max(1, int(kept * workload.length / BLOCK)),
        prefill_rate=prefill_rate,
        attended_s=attended_s,
        request_s=0.0,  # the simulator would have it keep the GPU busy
        decode_s=decode_s,
        sequence_s=sequence_s,
        context_s=context_s,
        batching=True,
        chunk_tokens=chunk,
        max_seqs=max(1, serving.engine.max_seqs // pool.layout.pp),
    )


def _prefill(pool: Pool, chunk: int) -> tuple[float, float]:
    """Tokens a second, and seconds for each pair of tokens, so that a prompt of the mean length and one of twice that
    take what the roofline says."""
    if pool.role is Role.DECODE:
        return _MANY_TOKENS_PER_S, 0.0
    rates = pool.serving.rates
    tokens = max(1.0, pool.serving.workload.prompt_tokens)
    once, twice = rates.prefill_s(tokens, 0.0, chunk), rates.prefill_s(2.0 * tokens, 0.0, chunk)
    pair_s = max(0.0, (twice - 2.0 * once) / tokens**2)
    return tokens / max(1e-9, once - pair_s * tokens**2 / 2.0), pair_s


def _jobs(workload: Workload, role: Role, seconds: float, seed: int, prefixes: int) -> Iterator[Job]:
    """Requests as the workload says; what is found in caches is one of some prefixes, all equally popular."""
    rng = Random(f"{seed} sizing")  # noqa: S311 (repeatable on purpose)
    shared = int(workload.hit_rate * workload.prompt_tokens / BLOCK) if role is not Role.DECODE else 0
    keys = [tuple(numbered_key(which * shared + place + 1) for place in range(shared)) for which in range(prefixes)]
    at = 0.0
    while (at := at + _gap(rng, workload)) < seconds:
        own = workload.prompt_tokens - shared * BLOCK
        scale = workload.prompt_tokens / own if own > 0.0 else 1.0
        prompt = shared * BLOCK + max(1, round(_size(rng, own, workload.prompt_scv * scale**2)))
        output = 1 if role is Role.PREFILL else max(1, round(_size(rng, workload.output_tokens, workload.output_scv)))
        prefix = keys[rng.randrange(prefixes)]
        yield Job(at, prefix, prompt, output, own_blocks=-(-(prompt + output) // BLOCK) - shared)


def _gap(rng: Random, workload: Workload) -> float:
    """Gamma-distributed: exponential where the variation is Poisson's."""
    scv = workload.arrival_scv
    if scv <= 0.0:
        return 1.0 / workload.requests_per_s
    return rng.gammavariate(1.0 / scv, scv / workload.requests_per_s)


def _size(rng: Random, mean: float, scv: float) -> float:
    if scv <= 0.0:
        return mean
    variance = math.log1p(scv)
    return mean * rng.lognormvariate(-variance / 2.0, math.sqrt(variance))


def _quiet(ledger: Ledger) -> None:
    pass
