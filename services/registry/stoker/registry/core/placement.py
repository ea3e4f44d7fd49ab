"""What the registry refuses of a deployment's placement."""

from __future__ import annotations

from stoker.api.common.v1 import common_pb2, placement_pb2
from stoker.common.errors import FieldViolation
from stoker.registry.core import validation
from stoker.registry.core.validation import Violations

_MAX_WATTS = 100_000
_MAX_RATE = 10**15
_MAX_NAMES = 64
_MAX_NAME_CHARACTERS = 253


def policy(field: str, value: placement_pb2.PlacementPolicy, spec: common_pb2.DeploymentSpec) -> Violations:
    """What is wrong with a placement that `field` holds, of the deployment `spec`."""
    gpus = spec.gpus_per_node
    group = value.tensor_parallel
    if group and (group > gpus or gpus % group):
        yield FieldViolation(
            f"{field}.tensor_parallel", f"{group} does not divide gpus_per_node, {gpus}; leave it out for all of them"
        )
    if value.HasField("watts_per_gpu") and not 1 <= value.watts_per_gpu <= _MAX_WATTS:
        yield FieldViolation(f"{field}.watts_per_gpu", f"{value.watts_per_gpu} is not in 1 to {_MAX_WATTS}, in watts")
    for name in ("member_bytes_per_s", "pair_bytes_per_s"):
        if getattr(value, name) > _MAX_RATE:
            yield FieldViolation(f"{field}.{name}", f"{getattr(value, name)} is too large; at most {_MAX_RATE}")
    yield from _pair(field, value, spec)
    if value.spread.domain not in placement_pb2.FailureDomain.values():
        yield FieldViolation(
            f"{field}.spread.domain", f"{value.spread.domain} is unknown to this registry; use {_domains()}"
        )
    if not 0 <= value.spread.largest_share <= 1:  # nor is NaN
        yield FieldViolation(
            f"{field}.spread.largest_share", f"{value.spread.largest_share:g} is no share; give 0 to 1"
        )
    for name in ("regions", "providers"):
        yield from _names(f"{field}.{name}", list(getattr(value, name)))


def _pair(field: str, value: placement_pb2.PlacementPolicy, spec: common_pb2.DeploymentSpec) -> Violations:
    if value.pair:
        yield from validation.name(f"{field}.pair", value.pair)
        if value.pair == spec.name:
            yield FieldViolation(f"{field}.pair", "is the deployment itself; name the other one of the pair")
    elif value.pair_bytes_per_s:
        yield FieldViolation(f"{field}.pair_bytes_per_s", "is given without `pair`; name the other deployment")
    if value.HasField("pair_latency_s") and not 0 < value.pair_latency_s <= 10:
        yield FieldViolation(
            f"{field}.pair_latency_s", f"{value.pair_latency_s:g} is not above 0 up to 10, in seconds"
        )


def _names(field: str, names: list[str]) -> Violations:
    if len(names) > _MAX_NAMES:
        yield FieldViolation(field, f"{len(names)} names; at most {_MAX_NAMES}")
    for place, each in enumerate(names[:_MAX_NAMES]):
        if not 1 <= len(each) <= _MAX_NAME_CHARACTERS:
            yield FieldViolation(f"{field}[{place}]", f"needs 1 to {_MAX_NAME_CHARACTERS} characters")


def _domains() -> str:
    names = [name.removeprefix("FAILURE_DOMAIN_") for name in placement_pb2.FailureDomain.keys()[1:]]
    return f"{', '.join(names[:-1])} or {names[-1]}"
