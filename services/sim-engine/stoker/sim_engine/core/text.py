"""What the simulated model says: words that mean nothing, or a JSON value that fits a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MASK = (1 << 64) - 1
_MAX_DEPTH = 16


def mix(*values: int) -> int:
    """A well-spread 64-bit number from integers (splitmix64's finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def next_token(vocabulary: Sequence[int], seed: int, tokens: Sequence[int]) -> int:
    """A token that depends on the seed, the position and the last tokens: a greedy request repeats itself."""
    return vocabulary[mix(seed, len(tokens), *tokens[-4:]) % len(vocabulary)]


def logprob(seed: int, token: int, rank: int) -> float:
    """A plausible log-probability, smaller for a larger rank. Never positive."""
    return -0.05 - rank * 0.7 - (mix(seed, token) % 1000) / 5000


def example(schema: Any, depth: int = 0) -> Any:
    """A small JSON value that satisfies a JSON schema: constants, enums, types, objects, arrays, unions.

    References are followed inside `$defs`; patterns and formats are not imitated.
    """
    return _example(schema, schema if isinstance(schema, Mapping) else {}, depth)


def _example(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for union in ("anyOf", "oneOf", "allOf"):
        if schema.get(union):
            return _example({**schema[union][0], **_without(schema, union)}, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        return _example(_follow(reference, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    if kind == "object":
        wanted = schema.get("required", list(schema.get("properties", {})))
        known = schema.get("properties", {})
        return {name: _example(known.get(name, {}), root, depth + 1) for name in wanted}
    if kind == "array":
        count = max(1, int(schema.get("minItems", 1)))
        return [_example(schema.get("items", {}), root, depth + 1) for _ in range(min(count, 64))]
    return _scalar(kind, schema)


def _scalar(kind: str, schema: Mapping[str, Any]) -> Any:
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is not None:
            return int(low) + (1 if "exclusiveMinimum" in schema else 0) if low == int(low) else low
        return high - 1 if high is not None and high < 1 else 1
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    text = "word " * (1 + int(schema.get("minLength", 0)) // 5)
    return text.strip()[: int(schema["maxLength"])] if "maxLength" in schema else text.strip()


def _without(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    here: Any = root
    for part in reference.removeprefix("#/").split("/"):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here
