"""What the registry refuses of a deployment's placement."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.api.common.v1 import common_pb2, placement_pb2
from stoker.common.errors import FieldViolation
from stoker.registry.core import validation
from stoker.registry.core.validation import Violations

_MAX_WATTS = 100_000
_MAX_RATE = 10**15
_MAX_WEIGHT = 1_000
_MAX_NAMES = 64
_MAX_NAME_CHARACTERS = 253


def policy(field: str, value: placement_pb2.PlacementPolicy, spec: common_pb2.DeploymentSpec) -> Violations:
    """What is wrong with a placement that `field` holds, of the deployment `spec`."""
    yield from _group(field, value.tensor_parallel, spec)
    if value.HasField("watts_per_gpu") and not 1 <= value.watts_per_gpu <= _MAX_WATTS:
        yield FieldViolation(f"{field}.watts_per_gpu", f"{value.watts_per_gpu} W is not in 1 to {_MAX_WATTS}")
    for name, most in (("member_bytes_per_s", _MAX_RATE), ("pair_bytes_per_s", _MAX_RATE), ("weight", _MAX_WEIGHT)):
        if getattr(value, name) > most:
            yield FieldViolation(f"{field}.{name}", f"{getattr(value, name)} is too large; at most {most}")
    yield from _pair(field, value, spec)
    yield from _spread(f"{field}.spread", value.spread)
    yield from _regions(field, value)
    yield from _names(f"{field}.gpu_types", value.gpu_types)


def _group(field: str, size: int, spec: common_pb2.DeploymentSpec) -> Violations:
    gpus, members = spec.gpus_per_node, max(1, spec.gang_size)
    if not size:
        return
    inside = size <= gpus and gpus % size == 0
    over = 0 < gpus < size and size % gpus == 0 and members % (size // gpus) == 0
    if not inside and not over:
        yield FieldViolation(
            f"{field}.tensor_parallel",
            f"{size} does not divide a replica's GPUs, {members} x {gpus}; leave it out for all of a member's",
        )


def _pair(field: str, value: placement_pb2.PlacementPolicy, spec: common_pb2.DeploymentSpec) -> Violations:
    if value.pair:
        yield from validation.name(f"{field}.pair", value.pair)
        if value.pair == spec.name:
            yield FieldViolation(f"{field}.pair", "is the deployment itself; name the other one of the pair")
    elif value.pair_bytes_per_s:
        yield FieldViolation(f"{field}.pair_bytes_per_s", "is given without `pair`; name the other deployment")


def _spread(field: str, value: placement_pb2.PlacementSpread) -> Violations:
    known = placement_pb2.FailureDomain.values()[1:]
    for place, domain in enumerate(value.domains[: len(known) + 1]):
        if domain not in known or domain in value.domains[:place]:
            yield FieldViolation(
                f"{field}.domains[{place}]", f"{domain} is unknown to this registry, or there twice; use {_domains()}"
            )
    if value.HasField("largest_share") and not 0 < value.largest_share <= 1:  # nor is NaN
        yield FieldViolation(f"{field}.largest_share", f"{value.largest_share:g} is not above 0 up to 1")


def _regions(field: str, value: placement_pb2.PlacementPolicy) -> Violations:
    yield from _names(f"{field}.regions", [each.region for each in value.regions])
    shares = [each.share for each in value.regions]
    if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-6:
        yield FieldViolation(f"{field}.regions", "shares are 0 to 1 each, and at most 1 together")
    if value.HasField("reach_s") and not (value.near and 0 <= value.reach_s <= 10):
        yield FieldViolation(f"{field}.reach_s", "is 0 to 10 s from the region that `near` names; give both")


def _names(field: str, names: Sequence[str]) -> Violations:
    if len(names) > _MAX_NAMES:
        yield FieldViolation(field, f"{len(names)} of them; at most {_MAX_NAMES}")
    for place, each in enumerate(names[:_MAX_NAMES]):
        if not 1 <= len(each) <= _MAX_NAME_CHARACTERS:
            yield FieldViolation(f"{field}[{place}]", f"needs 1 to {_MAX_NAME_CHARACTERS} characters")


def _domains() -> str:
    names = [name.removeprefix("FAILURE_DOMAIN_") for name in placement_pb2.FailureDomain.keys()[1:]]
    return f"{', '.join(names[:-1])} or {names[-1]}, each once"
