"""The best way to serve a workload: every layout that the machines permit, replicas for each, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from stoker.planner.core.sizing.architecture import Model
from stoker.planner.core.sizing.layout import Layout, refusal, stages
from stoker.planner.core.sizing.machine import Machine
from stoker.planner.core.sizing.memory import Engine, Memory, memory, sequence_bytes
from stoker.planner.core.sizing.rates import Correction, Rates
from stoker.planner.core.sizing.serving import Serving, State
from stoker.planner.core.sizing.workload import Role, Slo, Workload


class Objective(Enum):
    """What is made small."""

    GPUS = "gpus"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the search ends: GPUs of one replica, and what is considered at all."""

    gpus: int = 16
    disaggregated: bool = True
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None


@dataclass(frozen=True)
class Pool:
    """Replicas of one role. `fewest` and `most` are those with times one standard error shorter and longer."""

    serving: Serving
    state: State
    binding: str
    resource: str
    fewest: int | None = None
    most: int | None = None

    @property
    def role(self) -> Role:
        """What they do."""
        return self.serving.role

    @property
    def layout(self) -> Layout:
        """Of each."""
        return self.serving.rates.layout

    @property
    def machine(self) -> Machine:
        """Where they are."""
        return self.serving.rates.machine

    @property
    def replicas(self) -> int:
        """How many."""
        return self.state.replicas

    @property
    def gpus(self) -> int:
        """Of all."""
        return self.replicas * self.layout.gpus

    @property
    def busy(self) -> float:
        """Share of the time in which a rank computes: prefill, and whatever decoding is left to do."""
        decoding = min(1.0, self.state.sequences)
        return self.state.prefill_share + (1.0 - self.state.prefill_share) * decoding

    @property
    def watts(self) -> float:
        """Of all, with their part of the hosts."""
        return self.gpus * self.machine.watts(self.busy)


@dataclass(frozen=True)
class Plan:
    """One pool that does both, or one for prefill and one for decode."""

    pools: tuple[Pool, ...]
    workload: Workload

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are apart."""
        return len(self.pools) > 1

    @property
    def gpus(self) -> int:
        """In all."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def cost_per_hour(self) -> float:
        """Of all GPUs; 0 where nobody said."""
        return sum(pool.gpus * pool.machine.cost_per_hour for pool in self.pools)

    @property
    def watts(self) -> float:
        """Drawn on average."""
        return sum(pool.watts for pool in self.pools)

    @property
    def tokens_per_joule(self) -> float:
        """Generated."""
        return self.workload.tokens_per_s / self.watts if self.watts else 0.0

    @property
    def ttft_s(self) -> float:
        """At the percentile of the SLO."""
        return max(pool.state.ttft_s for pool in self.pools)

    @property
    def itl_s(self) -> float:
        """At the percentile of the SLO."""
        return max(pool.state.itl_s for pool in self.pools)

    @property
    def name(self) -> str:
        """As a reader calls it."""
        return " + ".join(
            f"{pool.replicas} × {pool.layout.name}" + ("" if pool.role is Role.BOTH else f" {pool.role.value}")
            for pool in self.pools
        )

    def value(self, objective: Objective) -> float:
        """What is made small."""
        if objective is Objective.COST:
            return self.cost_per_hour
        return float(self.gpus) if objective is Objective.GPUS else self.watts


@dataclass(frozen=True)
class Candidate:
    """One layout on one machine in one role: what came of it. `refused` is empty where it does; `serving` is None
    where the model cannot be cut so."""

    machine: Machine
    layout: Layout
    role: Role
    serving: Serving | None = None
    pool: Pool | None = None
    refused: str = ""

    @property
    def memory(self) -> Memory | None:
        """Of one GPU."""
        return self.serving.memory if self.serving else None


@dataclass(frozen=True)
class Answer:
    """`best` is None where nothing keeps the SLO; the candidates say why. `frontier` are the plans that no other
    beats in GPUs, both times and tokens per joule."""

    candidates: tuple[Candidate, ...]
    frontier: tuple[Plan, ...]
    best: Plan | None


@dataclass(frozen=True)
class Sizing:
    """A question: what is needed to serve this."""

    model: Model
    machines: tuple[Machine, ...]
    workload: Workload
    slo: Slo
    limits: Limits = Limits()
    objective: Objective = Objective.GPUS
    corrections: dict[str, Correction] | None = None
    """By name of the GPU type."""
    engines: dict[str, Engine] | None = None
    """By name of the GPU type; vLLM's defaults for those that are not in it."""

    def answer(self, look: Callable[[], None] = lambda: None) -> Answer:
        """The best plan, what else is on the frontier, and what was considered; the same whenever it is asked.

        `look` is called before each layout, which may take a second; what it raises ends the search.
        """
        candidates: list[Candidate] = []
        plans: list[Plan] = []
        roles = [Role.BOTH, *([Role.PREFILL, Role.DECODE] if self.limits.disaggregated else [])]
        for machine in self.machines:
            found: dict[Role, list[Pool]] = {}
            for role in roles:
                tried = []
                for layout in layouts(self.model, machine, self.limits):
                    look()
                    tried.append(self._try(machine, layout, role))
                candidates += tried
                found[role] = [each.pool for each in tried if each.pool]
            plans += [Plan((pool,), self.workload) for pool in found[Role.BOTH]]
            apart = [self._least(found[role]) for role in roles[1:]]
            if apart and all(apart):
                plans.append(Plan(tuple(pool for pool in apart if pool), self.workload))
        frontier = tuple(sorted(_undominated(plans), key=self._order))
        best = min(plans, key=self._order, default=None)
        return Answer(tuple(candidates), frontier, self._with_errors(best) if best else None)

    def serving(self, machine: Machine, layout: Layout, role: Role, correction: Correction) -> Serving:
        """Replicas of a role in a layout on a machine, however many."""
        engine = self.engine_on(machine)
        held = memory(self.model, layout, machine.gpu, engine, [self.workload.length])
        rates = Rates(self.model, layout, machine, correction)
        apart = role is not Role.BOTH
        return Serving(
            rates,
            held,
            engine,
            self.workload,
            self.slo,
            role,
            # A request can be late in either pool.
            self.slo.may_miss / 2.0 if apart else self.slo.may_miss,
            transfer_s(self.model, layout, machine, self.workload.prompt_tokens) if apart else 0.0,
        )

    def _try(self, machine: Machine, layout: Layout, role: Role) -> Candidate:
        correction = self.corrected(machine.gpu.name)
        why = self._too_long() or refusal(self.model, layout) or Rates(self.model, layout, machine).refusal()
        if why:
            return Candidate(machine, layout, role, refused=why)
        serving = self.serving(machine, layout, role, correction)
        if not serving.memory.fits:
            missing = f"does not fit: {serving.memory.missing / 1e9:,.1f} GB too much on each GPU"
            return Candidate(machine, layout, role, serving, refused=missing)
        if why := serving.refusal():
            return Candidate(machine, layout, role, serving, refused=why)
        state = serving.least()
        if state is None:
            return Candidate(machine, layout, role, serving, refused="no number of replicas keeps the SLO")
        return Candidate(machine, layout, role, serving, Pool(serving, state, *serving.binding(state)))

    def _too_long(self) -> str | None:
        tokens, context = self.workload.prompt_tokens + self.workload.output_tokens, self.model.context
        return f"{tokens:,.0f} tokens exceed the model's context of {context:,}" if tokens > context else None

    def engine_on(self, machine: Machine) -> Engine:
        """The settings of engines there."""
        return (self.engines or {}).get(machine.gpu.name) or Engine.on(machine.gpu)

    def corrected(self, gpu: str) -> Correction:
        """What measurements say of a GPU type; where there are none, that the roofline is right."""
        return (self.corrections or {}).get(gpu, Correction())

    def _with_errors(self, plan: Plan) -> Plan:
        """With the replicas that slower and faster hardware would need."""
        pools = []
        for pool in plan.pools:
            counts = []
            for deviations in (-1.0, 1.0):
                correction = self.corrected(pool.machine.gpu.name).slower(deviations)
                serving = self.serving(pool.machine, pool.layout, pool.role, correction)
                state = None if serving.refusal() else serving.least()
                counts.append(state.replicas if state else None)
            pools.append(replace(pool, fewest=counts[0], most=counts[1]))
        return Plan(tuple(pools), plan.workload)

    def _least(self, pools: Sequence[Pool]) -> Pool | None:
        single = [Plan((pool,), self.workload) for pool in pools]
        best = min(single, key=self._order, default=None)
        return best.pools[0] if best else None

    def _order(self, plan: Plan) -> tuple[float, float, float, bool, int, str, str]:
        """Least first; among equals what draws less, what answers sooner, and what is simpler."""
        return (
            plan.value(self.objective),
            float(plan.gpus),
            round(plan.watts),
            plan.disaggregated,
            max(pool.layout.gpus for pool in plan.pools),
            plan.pools[0].machine.name,
            plan.name,
        )


def smallest_fitting(model: Model, machine: Machine, engine: Engine) -> Layout | None:
    """The layout with the fewest GPUs that leaves room for KV; None where not even a thousand do."""
    for gpus in _powers(1_024):
        fitting = [
            layout
            for layout in layouts(model, machine, Limits(gpus))
            if layout.gpus == gpus
            and not refusal(model, layout)
            and not Rates(model, layout, machine).refusal()
            and memory(model, layout, machine.gpu, engine).fits
        ]
        if fitting:
            return min(fitting)
    return None


def layouts(model: Model, machine: Machine, limits: Limits) -> Iterator[Layout]:
    """All that are worth a look: powers of two; TP inside one NVLink domain, or inside a host where there is none;
    data-parallel ranks and expert parallelism for models with experts."""
    most_tp = machine.domain if machine.domain > 1 else machine.per_node
    experts = bool(model.experts)
    for tp in _powers(min(most_tp, limits.gpus)) if limits.tp is None else [limits.tp]:
        for pp in _powers(min(8, limits.gpus)) if limits.pp is None else [limits.pp]:
            for dp in _powers(limits.gpus if experts else 1) if limits.dp is None else [limits.dp]:
                for expert_parallel in (False, True) if experts and tp * dp > 1 else (False,):
                    layout = Layout(tp, pp, dp, expert_parallel)
                    # Experts that are cut by width over data-parallel ranks talk more than whole ones, for nothing.
                    wasteful = dp > 1 and not expert_parallel
                    if layout.gpus <= limits.gpus and not wasteful and _whole_nodes(layout, machine):
                        yield layout


def transfer_s(model: Model, layout: Layout, machine: Machine, tokens: float) -> float:
    """Seconds that the KV of a prompt needs over the fabric (or PCIe, inside a host), from all its GPUs at once."""
    rate = machine.fabric_rate or float(machine.gpu.pcie_bandwidth)
    if not rate:
        return 0.0
    engine = Engine()
    return max(sequence_bytes(model, layout, engine, tokens, runs) for runs in stages(model, layout)) / rate


def _powers(most: int) -> list[int]:
    return [2**place for place in range(max(0, int(math.log2(max(1, most)))) + 1)]


def _whole_nodes(layout: Layout, machine: Machine) -> bool:
    """Whether a replica fills hosts, or several fill one."""
    gpus, per_node = layout.gpus, machine.per_node
    return per_node % gpus == 0 if gpus <= per_node else gpus % per_node == 0


def _undominated(plans: Sequence[Plan]) -> list[Plan]:
    values = [(plan.gpus, plan.ttft_s, plan.itl_s, -plan.tokens_per_joule) for plan in plans]
    return [
        plan
        for plan, mine in zip(plans, values, strict=True)
        if not any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in values)
    ]
