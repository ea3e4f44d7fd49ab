"""From a sizing answer to what placement needs: GPUs by node, groups that must be close, watts, and traffic."""

from __future__ import annotations

from stoker.planner.core.placement.values import Need, Pair
from stoker.planner.core.sizing.layout import stages
from stoker.planner.core.sizing.memory import sequence_bytes
from stoker.planner.core.sizing.search import Plan, Pool
from stoker.planner.core.sizing.workload import Role, Workload
from stoker.planner.core.units import BytesPerSecond


def needs(plan: Plan, deployment: str) -> tuple[Need, ...]:
    """One need for each pool. A pool that prefills or decodes only is a deployment of its own, named after what it
    does: `chat-prefill`, `chat-decode`; KV goes from the one to the other."""
    return tuple(_need(plan, pool, _named(deployment, pool.role)) for pool in plan.pools)


def kv_rate(plan: Plan) -> BytesPerSecond:
    """KV that goes from prefill to decode, bytes per second, all replicas together; of what is cached only at the
    one or the other, too."""
    prefill, workload = plan.pools[0].serving, plan.workload
    layout, model = prefill.rates.layout, prefill.rates.model
    per_gpu = [
        sequence_bytes(model, layout, prefill.engine, workload.prompt_tokens, runs) for runs in stages(model, layout)
    ]
    copies = 1 if model.latent else layout.tp
    return BytesPerSecond(round(workload.requests_per_s * sum(per_gpu) * copies))


def member_rate(pool: Pool) -> BytesPerSecond:
    """What one node of a replica sends to the next, bytes per second; 0 where a replica is on one node."""
    machine, layout, workload = pool.machine, pool.layout, pool.serving.workload
    members = -(-layout.gpus // machine.per_node)
    if members == 1:
        return BytesPerSecond(0)
    rates, tokens = pool.serving.rates, _tokens_per_s(pool.role, workload) / pool.replicas
    inside = layout.tp * layout.dp
    crossing = tokens * rates.model.width * 2.0 if layout.pp > 1 else 0.0
    if inside > machine.per_node:
        # Of what a rank sends to the others of its stage, the part that leaves the node.
        away = (inside - machine.per_node) / (inside - 1.0)
        crossing += away * machine.per_node * rates.traffic(tokens) / layout.pp
    return BytesPerSecond(round(crossing))


def _need(plan: Plan, pool: Pool, deployment: str) -> Need:
    machine, layout = pool.machine, pool.layout
    members = -(-layout.gpus // machine.per_node)
    # Ranks that exchange tokens with each other's experts by NVLink belong together as TP ranks do.
    ranks = layout.tp * layout.dp
    close = ranks if layout.expert_parallel and 1 < ranks <= machine.domain else layout.tp
    return Need(
        deployment=deployment,
        replicas=pool.replicas,
        gpus=layout.gpus // members,
        members=members,
        tensor_parallel=close,
        gpu_types=frozenset({machine.gpu.name}),
        engine="vllm",
        # A busy GPU draws what its node type says, where that says anything.
        busy_power=None if machine.node.max_power else machine.gpu.max_power,
        peer_rate=member_rate(pool),
        pair=Pair(_named(deployment.removesuffix("-prefill"), Role.DECODE), kv_rate(plan))
        if pool.role is Role.PREFILL
        else None,
    )


def _tokens_per_s(role: Role, workload: Workload) -> float:
    """Tokens that go through the layers."""
    prefill = 0.0 if role is Role.DECODE else workload.prompt_tokens * (1.0 - workload.hit_rate)
    decode = 0.0 if role is Role.PREFILL else workload.output_tokens
    return workload.requests_per_s * (prefill + decode)


def _named(deployment: str, role: Role) -> str:
    return deployment if role is Role.BOTH else f"{deployment}-{role.value}"
