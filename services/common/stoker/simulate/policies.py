"""Policies as they are named on a command line: KIND, or KIND:SETTING=VALUE,SETTING=VALUE."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf
from typing import Any

from stoker.common.errors import InvalidRequest
from stoker.registry.core import scaling
from stoker.registry.core.validation import Limits
from stoker.scaler.core.policy import Kind, Policy
from stoker.scaler.policy_messages import message_of
from stoker.simulate.clairvoyant import Plan
from stoker.simulate.settings import Objective

_OPTION = "--policy"
_MOST = Limits().replicas
_KINDS = ", ".join(Kind)


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy under the name by which it was given."""

    name: str
    policy: Policy
    replicas: int | None = None
    """Of a fixed count."""
    plan: Plan | None = None
    """Of counts that are known beforehand: the policy is that of a fixed count."""


def parsed(text: str, objective: Objective) -> Contender:
    """Read one policy. The SLO of those that have one is the objective's where the text says nothing else.

    `fixed:6` is six replicas. A setting without a point is one of the kind's own section, as `target` in
    `concurrency:target=6`; all others are named in full, as `pace.settle_s` or `slo.ttft_s`.
    Raises InvalidRequest saying what may be said.
    """
    kind_text, _, rest = text.partition(":")
    try:
        kind = Kind(kind_text)
    except ValueError:
        raise InvalidRequest.field(_OPTION, f"{kind_text!r} is no policy; choose from {_KINDS}") from None
    slo = replace(Policy().slo, ttft_s=objective.ttft_s, itl_s=inf if objective.itl_s is None else objective.itl_s)
    policy = Policy(kind=kind, slo=slo)
    if kind is Kind.FIXED:
        if not (rest.isascii() and rest.isdigit()) or len(rest) > len(str(_MOST)) or int(rest) > _MOST:
            raise InvalidRequest.field(_OPTION, f"{text!r}: say how many, as in fixed:6, {_MOST} at most")
        return Contender(text, policy, int(rest))
    for setting in filter(None, rest.split(",")):
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidRequest.field(_OPTION, f"{text!r}: {setting!r} is not SETTING=VALUE")
        path = name.split(".") if "." in name else [_section(kind, name, text), name]
        policy = _set(policy, [part for part in path if part], value, text)
    _check(policy, text)
    return Contender(text, policy)


def _check(policy: Policy, said: str) -> None:
    """What the registry would refuse is no answer to what a policy would do."""
    if policy.slo.itl_s == inf:  # an objective without one
        policy = replace(policy, slo=replace(policy.slo, itl_s=Policy().slo.itl_s))
    try:
        message = message_of(policy)
    except (ValueError, OverflowError) as error:  # a count that the wire cannot carry
        raise InvalidRequest.field(_OPTION, f"{said!r}: {error}; give a count from 0 to {_MOST}") from error
    wrong = "; ".join(
        f"{each.field.removeprefix('.')}: {each.description}" for each in scaling.policy("", message, Limits())
    )
    if wrong:
        raise InvalidRequest.field(_OPTION, f"{said!r}: {wrong}")


def _section(kind: Kind, name: str, said: str) -> str:
    """Where a setting without a point stands: in the kind's own section, or in none. The forecast has the SLO's
    settings, too."""
    sections = [kind, Kind.SLO] if kind is Kind.FORECAST else [kind]
    known = {field.name: section for section in sections for field in fields(getattr(Policy(), section))}
    if name not in known and name not in {field.name for field in fields(Policy())}:
        able = ", ".join(sorted(known))
        raise InvalidRequest.field(
            _OPTION, f"{said!r}: {kind} has no setting {name!r}, but {able}; name others in full, as pace.settle_s"
        )
    return known.get(name, "")


def _set(value: Any, path: list[str], text: str, said: str) -> Any:
    """The dataclass with one setting changed, some levels down."""
    name, rest = path[0], path[1:]
    known = {field.name: getattr(value, field.name) for field in fields(value)}
    old = known.get(name)
    if name not in known or bool(rest) != is_dataclass(old):
        able = ", ".join(sorted(each for each, what in known.items() if isinstance(what, float | int) or not rest))
        raise InvalidRequest.field(_OPTION, f"{said!r}: no setting {'.'.join(path)!r}; there are {able}")
    return replace(value, **{name: _set(old, rest, text, said) if rest else _read(old, name, text, said)})


def _read(old: object, name: str, text: str, said: str) -> object:
    try:
        if isinstance(old, bool):
            return {"true": True, "false": False}[text]
        if isinstance(old, int):
            return int(text)
        if isinstance(old, float):
            return float(text)
    except (ValueError, KeyError):
        pass
    raise InvalidRequest.field(_OPTION, f"{said!r}: {name} cannot be {text!r}; it is {old!r} by default")
