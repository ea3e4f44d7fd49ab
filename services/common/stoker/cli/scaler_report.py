"""What `stoker scaler` shows: plain values, and tables made of them."""

from __future__ import annotations

import json
import math
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stoker.api.common.v1 import scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.api.scaler.v1 import scaler_pb2
from stoker.cli.output import or_dash

_COLUMNS = (
    ("ready", "ready", "{}"),
    ("starting", "starting", "{}"),
    ("arrivals_per_s", "req/s", "{:.1f}"),
    ("queued", "queued", "{:.0f}"),
    ("running", "running", "{:.0f}"),
    ("waiting", "waiting", "{:.0f}"),
    ("prefill_tokens_per_s", "prompt tok/s", "{:,.0f}"),
    ("decode_tokens_per_s", "tok/s", "{:,.0f}"),
    ("hit_rate", "hits", "{:.0%}"),
    ("kv_usage", "KV use", "{:.0%}"),
    ("ttft_s", "TTFT", "{:.2f} s"),
    ("itl_s", "ITL", "{:.3f} s"),
    ("within_slo", "in SLO", "{:.0%}"),
)


def why_json(deployment: str, answer: scaler_pb2.WhyDeploymentResponse) -> dict[str, Any]:
    """All that a scaler told of a deployment. What is unknown is null, which is not zero."""
    return {
        "deployment": deployment,
        "standing": decision_json(answer.standing) if answer.HasField("standing") else None,
        "now": decision_json(answer.now) if answer.HasField("now") else None,
        "held": answer.held or None,
        "policy": policy_json(answer.policy),
        "paused": answer.HasField("pause"),
        "pause_note": answer.pause.note or None,
        "group": list(answer.group),
        "measured": _figures(answer.measured),
        "samples": [_timed(sample) for sample in answer.samples],
        "minutes": [_timed(minute) for minute in answer.minutes],
    }


def dry_run_json(deployment: str, answer: scaler_pb2.DryRunResponse) -> dict[str, Any]:
    """What a policy would decide."""
    return {
        "deployment": deployment,
        "decision": decision_json(answer.decision),
        "standing": decision_json(answer.standing) if answer.HasField("standing") else None,
        "policy": policy_json(answer.policy),
    }


def decision_json(desired: records_pb2.Desired) -> dict[str, Any]:
    """A decision with its reasons, what decided most first."""
    return {
        "replicas": desired.replicas,
        "reason": desired.reason,
        "victims": list(desired.victims),
        "decided_at": desired.decided_at.ToJsonString() if desired.HasField("decided_at") else None,
        "because": [
            {
                "code": because.code,
                "text": because.text,
                "numbers": {name: _known(value) for name, value in sorted(because.numbers.items())},
            }
            for because in desired.because
        ],
    }


def policy_json(policy: scaling_pb2.ScalingPolicy) -> dict[str, Any]:
    """A policy, as a deployment file has it."""
    value: dict[str, Any] = MessageToDict(policy, preserving_proto_field_name=True)
    for schedule in value.get("schedules", ()):
        if "days" in schedule:
            schedule["days"] = [day.removeprefix("WEEKDAY_").lower() for day in schedule["days"]]
    return {**value, "kind": kind_name(policy)}


def kind_name(policy: scaling_pb2.ScalingPolicy) -> str:
    """ "slo", or "fixed" where nothing is said."""
    name = scaling_pb2.ScalingKind.Name(policy.kind).removeprefix("SCALING_KIND_").lower()
    return "fixed" if name == "unspecified" else name


def why_tables(value: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    shown: list[RenderableType] = []
    if value["paused"]:
        note = f": {value['pause_note']}" if value["pause_note"] else ""
        shown.append(Text(f"paused by an operator{note}", style="yellow"))
    shown += _decision("stands", value["standing"])
    shown += [Text(f"nothing is decided now: {value['held']}", style="yellow")] if value["held"] else []
    if value["now"] is not None and not _alike(value["now"], value["standing"]):
        shown += _decision("now", value["now"])
    if len(value["group"]) > 1:
        shown.append(f"shares its demand with {', '.join(value['group'])}")
    known = [f"{name} {_short(figure)}" for name, figure in value["measured"].items() if figure is not None]
    shown.append(f"measured: {', '.join(known) or 'nothing yet'}")
    if value["samples"]:
        shown.append(_samples(value["samples"]))
    shown.append(f"policy: {value['policy']['kind']}; see `stoker scaler policy {value['deployment']}`")
    return shown


def dry_run_tables(value: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    return [*_decision("stands", value["standing"]), *_decision("would be", value["decision"])]


def policy_lines(policy: dict[str, Any], inside: str = "") -> list[RenderableType]:
    """A policy as lines of `--set`."""
    shown: list[RenderableType] = []
    for name, setting in policy.items():
        if isinstance(setting, dict):
            shown += policy_lines(setting, f"{inside}{name}.")
        else:
            shown.append(Text(f"{inside}{name}={setting if isinstance(setting, str) else json.dumps(setting)}"))
    return shown


def _decision(what: str, decision: dict[str, Any] | None) -> list[RenderableType]:
    if decision is None:
        return [f"{what}: nothing decided yet"]
    head = Text.assemble((f"{what}: ", "bold"), (str(decision["replicas"]), "bold green"), f" {decision['reason']}")
    if decision["victims"]:
        head.append(f"; to go first: {', '.join(decision['victims'])}")
    shown: list[RenderableType] = [head]
    for because in decision["because"]:
        figures = ", ".join(f"{name} {_short(number)}" for name, number in because["numbers"].items())
        shown.append(Text(f"  {because['code']}: {because['text']}" + (f" ({figures})" if figures else "")))
    return shown


def _alike(now: dict[str, Any], standing: dict[str, Any] | None) -> bool:
    return standing is not None and {**now, "decided_at": None} == {**standing, "decided_at": None}


def _samples(samples: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("at (UTC)")
    for _, title, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for sample in samples:
        cells = [or_dash(sample[name], form) for name, _, form in _COLUMNS]
        table.add_row(sample["at"][11:19], *cells)
    return table


def _timed(message: scaler_pb2.Sample | scaler_pb2.Minute) -> dict[str, Any]:
    return {"at": message.at.ToJsonString(), **_figures(message)}


def _figures(message: Any) -> dict[str, Any]:
    figures = {}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            known = not field.has_presence or message.HasField(field.name)
            figures[field.name] = getattr(message, field.name) if known else None
    return figures


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
