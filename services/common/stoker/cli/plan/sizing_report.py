"""How `stoker plan size` shows its answer: as JSON, and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from stoker.cli.output import or_dash
from stoker.planner.checking import Checked
from stoker.planner.core.sizing import demand
from stoker.planner.core.sizing.machine import Machine
from stoker.planner.core.sizing.measured import Used
from stoker.planner.core.sizing.memory import Memory
from stoker.planner.core.sizing.search import Answer, Candidate, Plan, Pool, Sizing, smallest_fitting
from stoker.planner.core.sizing.workload import Role

_BINDING = {
    "one_replica": "one replica is enough",
    "throughput": "with one fewer the queue would grow without end",
    "ttft": "with one fewer too many first tokens would come late",
    "itl": "with one fewer too many tokens would come too slowly",
    "kv_cache": "with one fewer the KV cache would be full",
    "max_seqs": "with one fewer the batch (max_num_seqs) would be full",
}
_MOST_ROWS = 12


@dataclass(frozen=True)
class Report:
    """A sizing, its answer, what measurements it used by GPU type, and what a simulation says."""

    question: Sizing
    answer: Answer
    used: Mapping[str, Used]
    checked: Sequence[Checked] | None

    def value(self) -> dict[str, Any]:
        """All of it; docs/sizing.md has the keys."""
        best = self.answer.best
        return {
            "model": self._model(),
            "inputs": self._inputs(),
            "replicas": best.pools[0].replicas if best and not best.disaggregated else None,
            "gpus": best.gpus if best else None,
            "binding": best.pools[0].binding if best and not best.disaggregated else None,
            "best": _plan(best) if best else None,
            "frontier": [_plan(plan) for plan in self.answer.frontier],
            "considered": [_candidate(each) for each in self.answer.candidates],
            "measured": {name: _used(each) for name, each in self.used.items()},
            "simulated": [_checked(each) for each in self.checked] if self.checked is not None else None,
        }

    def shown(self) -> list[RenderableType]:
        """Tables and sentences."""
        parts: list[RenderableType] = [self._head(), "", self._considered()]
        best = self.answer.best
        if best is None:
            return [*parts, "", self._nothing()]
        for pool in best.pools:
            parts += ["", _memory_table(pool)]
        parts += ["", self._result(best)]
        for name, used in self.used.items():
            parts.append(_measured_line(name, used))
        if self.checked is not None:
            parts += ["", _checked_table(self.checked)]
        return parts

    def _model(self) -> dict[str, Any]:
        model = self.question.model
        return {
            "name": model.name,
            "model_type": model.kind,
            "parameters": round(model.parameters),
            "active_parameters": round(model.active_parameters),
            "weight_bytes": round(model.weight_bytes * model.weight_scale),
            "weight_bytes_of_files": model.stored,
            "kv_bytes_per_token": round(model.kv_bytes_per_token),
            "kv_bytes_per_token_beyond_windows": round(model.kv_bytes_per_token_beyond_windows),
            "notes": list(model.notes),
        }

    def _inputs(self) -> dict[str, Any]:
        question, slo = self.question, self.question.slo
        load = question.workload
        return {
            "gpus": [machine.gpu.name for machine in question.machines],
            "nodes": [machine.node.name for machine in question.machines],
            "requests_per_s": load.requests_per_s,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "prompt_cv": math.sqrt(load.prompt_scv),
            "output_cv": math.sqrt(load.output_scv),
            "arrival_cv": math.sqrt(load.arrival_scv),
            "hit_rate": load.hit_rate,
            "slo_ttft_ms": 1e3 * slo.ttft_s,
            "slo_itl_ms": 1e3 * slo.itl_s if slo.itl_s else None,
            "percentile": 100.0 * slo.attainment,
            "objective": question.objective.value,
            "max_gpus_per_replica": question.limits.gpus,
            "engines": {machine.gpu.name: asdict(question.engine_on(machine)) for machine in question.machines},
        }

    def _head(self) -> str:
        model, load = self.question.model, self.question.workload
        active = f" ({model.active_parameters / 1e9:,.1f} active)" if model.experts else ""
        beyond = model.kv_bytes_per_token_beyond_windows
        windows = f", {beyond:,.0f} beyond its windows" if beyond != model.kv_bytes_per_token else ""
        lines = [
            f"{model.name}: {model.parameters / 1e9:,.1f} billion parameters{active}, "
            f"{model.weight_bytes * model.weight_scale / 1e9:,.1f} GB of weights, "
            f"{model.kv_bytes_per_token:,.0f} bytes of KV a token{windows}",
            f"{load.requests_per_s:g} requests/s of {load.prompt_tokens:,.0f} + {load.output_tokens:,.0f} tokens, "
            f"{load.hit_rate:.0%} of prompts cached; {self._objective()}",
            *(f"note: {note}" for note in model.notes),
        ]
        return "\n".join(lines)

    def _objective(self) -> str:
        slo = self.question.slo
        itl = f", a token each {1e3 * slo.itl_s:g} ms" if slo.itl_s else ""
        return f"{slo.attainment:.2%} with a first token in {1e3 * slo.ttft_s:,.0f} ms{itl}"

    def _considered(self) -> Table:
        """The best of each role, and those that cannot be."""
        table = Table(box=None, pad_edge=False, header_style="bold", title="layouts", title_justify="left")
        for column in ("GPU", "role", "layout"):
            table.add_column(column)
        for column in ("replicas", "GPUs", "TTFT", "ITL", "KV tokens each"):
            table.add_column(column, justify="right")
        table.add_column("binding, or why not", overflow="fold")
        several = len(self.question.machines) > 1
        for role in Role:
            rows = [each for each in self.answer.candidates if each.role is role]
            for each in sorted(rows, key=_rank)[:_MOST_ROWS]:
                table.add_row(*_cells(each))
            if len(rows) > _MOST_ROWS:
                table.add_row("", role.value, f"and {len(rows) - _MOST_ROWS} more; -o json has all")
        table.columns[0].min_width = 8 if several else 0
        return table

    def _result(self, best: Plan) -> str:
        lines = [f"answer: {best.name}, {best.gpus} GPUs"]
        for pool in best.pools:
            errors = f" ({or_dash(pool.fewest)} to {or_dash(pool.most)} within one standard error of the rates)"
            state = pool.state
            times = [
                f"TTFT {1e3 * state.ttft_s:,.0f} ms" if pool.role is not Role.DECODE else "",
                f"ITL {1e3 * state.itl_s:,.1f} ms" if pool.role is not Role.PREFILL else "",
            ]
            lines.append(
                f"  {pool.replicas} × {pool.layout.name} on {pool.machine.name}, {pool.role.value}{errors}: "
                f"{', '.join(filter(None, times))} at the percentile; binding: {_BINDING[pool.binding]} "
                f"({pool.resource})"
            )
        lines.append(f"  {best.watts / 1e3:,.1f} kW, {best.tokens_per_joule:.3f} generated tokens a joule")
        if best.disaggregated:
            lines.append(f"  KV from prefill to decode: {demand.kv_rate(best) / 1e9:,.2f} GB/s in all")
        return "\n".join(lines)

    def _nothing(self) -> str:
        """What would help, where nothing does."""
        if not self.answer.candidates:
            return (
                f"answer: none. No layout is as asked for: replicas have up to {self.question.limits.gpus} GPUs "
                "(--max-gpus) and fill hosts, or several fill one; TP, PP and DP multiply to that number."
            )
        reasons = {each.refused for each in self.answer.candidates}
        if len(reasons) == 1 and not any(each.serving for each in self.answer.candidates):
            return f"answer: none. {reasons.pop()}."
        served = [each.serving for each in self.answer.candidates if each.serving and each.serving.memory.fits]
        if not served:
            return "\n".join(
                [
                    f"answer: the model fits no layout of up to {self.question.limits.gpus} GPUs.",
                    *(self._would_fit(machine) for machine in self.question.machines),
                    "  Or take a quantized model, or GPUs with more memory.",
                ]
            )
        lines = ["answer: no layout keeps the SLO, with however many replicas."]
        prefill = min((each for each in served if each.role is not Role.DECODE), key=lambda each: each.first_token_s)
        decode = min((each for each in served if each.role is not Role.PREFILL), key=lambda each: each.token_s)
        lines.append(
            f"  The quickest first token, on an empty replica: {1e3 * prefill.first_token_s:,.0f} ms with "
            f"{prefill.rates.layout.name} on {prefill.rates.machine.gpu.name}; asked are "
            f"{1e3 * self.question.slo.ttft_s:,.0f} ms."
        )
        if self.question.slo.itl_s is not None:
            lines.append(
                f"  The quickest token, of a sequence alone: {1e3 * decode.token_s:,.1f} ms with "
                f"{decode.rates.layout.name} on {decode.rates.machine.gpu.name}; asked are "
                f"{1e3 * self.question.slo.itl_s:,.1f} ms."
            )
        return "\n".join([*lines, "  Loosen what cannot be, raise --max-gpus, or take faster GPUs."])

    def _would_fit(self, machine: Machine) -> str:
        missing = [
            (each.memory.missing, each.layout.name)
            for each in self.answer.candidates
            if each.machine == machine and each.memory
        ]
        least, name = min(missing, default=(0.0, "any layout"))
        found = smallest_fitting(self.question.model, machine, self.question.engine_on(machine))
        more = (
            f"{found.name}, {found.gpus} GPUs, would do (--max-gpus {found.gpus})" if found else "no number would do"
        )
        return f"  On {machine.gpu.name} {name} lacks least: {least / 1e9:,.1f} GB on each GPU; {more}."


def _rank(each: Candidate) -> tuple[bool, float, int]:
    return (each.pool is None, each.pool.gpus if each.pool else 0.0, each.layout.gpus)


def _cells(each: Candidate) -> list[str]:
    pool, memory = each.pool, each.memory
    tokens = f"{memory.tokens:,}" if memory else "–"
    place = [each.machine.gpu.name, each.role.value, each.layout.name]
    if pool is None:
        return [*place, "–", "–", "–", "–", tokens, each.refused]
    state = pool.state
    return [
        *place,
        f"{pool.replicas:,}",
        f"{pool.gpus:,}",
        f"{1e3 * state.ttft_s:,.0f} ms" if each.role is not Role.DECODE else "–",
        f"{1e3 * state.itl_s:,.1f} ms" if each.role is not Role.PREFILL else "–",
        tokens,
        f"{pool.binding} ({pool.resource})",
    ]


def _memory_table(pool: Pool) -> Table:
    memory = pool.serving.memory
    title = f"memory of one GPU, {pool.layout.name} on {pool.machine.gpu.name} ({pool.role.value})"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("term")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for name, value in memory.terms.items():
        if value:
            table.add_row(name.replace("_", " "), f"{value / 1e9:,.2f}", f"{value / memory.total:.1%}")
    table.add_row("total", f"{memory.total / 1e9:,.2f}", "100.0%")
    length = next(iter(memory.sequences), 0)
    fitting = memory.sequences.get(length, 0.0)
    table.caption = (
        f"{memory.blocks:,} blocks, {memory.tokens:,} tokens in a replica: {fitting:,.1f} × {length:,} tokens"
    )
    table.caption_justify = "left"
    return table


def _checked_table(checked: Sequence[Checked]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="simulated", title_justify="left")
    for column in ("role", "replicas", "within SLO", "needed", "TTFT p95", "ITL p95", ""):
        table.add_column(column, justify="left" if column == "role" else "right")
    for each in checked:
        table.add_row(
            each.role.value,
            str(each.replicas),
            f"{each.attainment:.2%}",
            f"{each.needed:.2%}",
            or_dash(each.ttft_ms, "{:,.0f} ms"),
            or_dash(each.itl_ms, "{:,.1f} ms"),
            "holds" if each.holds else "does not hold",
        )
    return table


def _measured_line(name: str, used: Used) -> str:
    left_out = "; ".join(f"{count} not used: {why}" for why, count in used.why.items())
    factor = used.correction
    text = (
        f"measured on {name}: {used.taken} times; prefill takes {factor.prefill:.2f} and decoding "
        f"{factor.decode:.2f} times what the roofline says"
    )
    return f"{text}; {left_out}" if left_out else text


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "disaggregated": plan.disaggregated,
        "gpus": plan.gpus,
        "cost_per_hour": plan.cost_per_hour or None,
        "kw": round(plan.watts / 1e3, 3),
        "tokens_per_joule": round(plan.tokens_per_joule, 5),
        "kv_transfer_bytes_per_s": int(demand.kv_rate(plan)) if plan.disaggregated else 0,
        "pools": [_pool(pool) for pool in plan.pools],
    }


def _pool(pool: Pool) -> dict[str, Any]:
    state = pool.state
    workload, engine = pool.serving.workload, pool.serving.engine
    return {
        "role": pool.role.value,
        **_layout(pool),
        "replicas": pool.replicas,
        "replicas_fewest": pool.fewest,
        "replicas_most": pool.most,
        "gpus": pool.gpus,
        "binding": pool.binding,
        "binding_resource": pool.resource,
        "ttft_ms": _ms(state.ttft_s) if pool.role is not Role.DECODE else None,
        "itl_ms": _ms(state.itl_s) if pool.role is not Role.PREFILL else None,
        "expected_within_slo": round(1.0 - state.late, 5),
        "prefill_share": round(state.prefill_share, 4),
        "sequences_per_rank": round(state.sequences, 2),
        "prefill_tokens_per_s": round(
            pool.serving.rates.prefill_tokens_per_s(workload.prompt_tokens, engine.batched_tokens)
        ),
        "step_ms": _ms(pool.serving.rates.step_s(max(1.0, state.sequences), workload.context)),
        "watts_per_gpu": round(pool.watts / pool.gpus),
        "peer_bytes_per_s": int(demand.member_rate(pool)),
        "memory": _memory(pool.serving.memory),
    }


def _layout(each: Pool | Candidate) -> dict[str, Any]:
    layout, machine = each.layout, each.machine
    return {
        "gpu": machine.gpu.name,
        "node": machine.node.name,
        "layout": layout.name,
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "expert_parallel": layout.expert_parallel,
        "gpus_per_replica": layout.gpus,
        "nodes_per_replica": -(-layout.gpus // machine.per_node),
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "total_bytes": round(memory.total),
        **{f"{name}_bytes": round(value) for name, value in memory.terms.items()},
        "kv_blocks": memory.blocks,
        "kv_tokens_per_replica": memory.tokens,
        "concurrency": {str(length): round(number, 2) for length, number in memory.sequences.items()},
    }


def _candidate(each: Candidate) -> dict[str, Any]:
    pool = each.pool
    return {
        "role": each.role.value,
        **_layout(each),
        "replicas": pool.replicas if pool else None,
        "gpus": pool.gpus if pool else None,
        "ttft_ms": _ms(pool.state.ttft_s) if pool and each.role is not Role.DECODE else None,
        "itl_ms": _ms(pool.state.itl_s) if pool and each.role is not Role.PREFILL else None,
        "binding": pool.binding if pool else None,
        "binding_resource": pool.resource if pool else None,
        "refused": each.refused or None,
        "missing_bytes_per_gpu": round(each.memory.missing) if each.memory else None,
        "kv_tokens_per_replica": each.memory.tokens if each.memory else None,
    }


def _used(used: Used) -> dict[str, Any]:
    return {"taken": used.taken, "not_used": dict(used.why), **asdict(used.correction)}


def _checked(each: Checked) -> dict[str, Any]:
    return {
        "role": each.role.value,
        "replicas": each.replicas,
        "attainment": each.attainment,
        "needed": each.needed,
        "holds": each.holds,
        "ttft_p95_ms": each.ttft_ms,
        "itl_p95_ms": each.itl_ms,
    }


def _ms(seconds: float) -> float | None:
    return round(1e3 * seconds, 3) if math.isfinite(seconds) else None
