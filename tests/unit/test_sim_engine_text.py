"""What the simulated model says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sim_engine.core import text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "minLength": 12}, "word word word"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "wor"),
        ({"type": "integer", "minimum": 7, "maximum": 9}, 7),
        ({"type": "integer", "exclusiveMinimum": 7}, 8),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, 0.5),
        ({"type": "integer", "maximum": -4}, -5),
        ({"type": ["null", "string"]}, None),
        ({"const": {"a": [1]}}, {"a": [1]}),
        ({"enum": [None, 2]}, None),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 3}, [True, True, True]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, 1),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}),
        (
            {
                "type": "object",
                "properties": {
                    "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
                    "more": {"type": "null"},
                },
                "required": ["list"],
                "$defs": {"item": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}},
            },
            {"list": [{"n": 1}]},
        ),
        (True, None),
    ],
)
def test_examples_fit_their_schema(schema: Any, value: object) -> None:
    assert text.example(schema) == value


def test_a_schema_that_contains_itself_ends() -> None:
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    assert "next" in text.example(schema)


def test_the_same_words_for_the_same_seed_and_others_for_another() -> None:
    vocabulary = tuple(range(100, 1100))

    def say(seed: int) -> list[int]:
        tokens = [1, 2, 3]
        for _ in range(20):
            tokens.append(text.next_token(vocabulary, seed, tokens))
        return tokens[3:]

    assert say(0) == say(0)
    assert say(0) != say(1)
    assert len(set(say(0))) > 10


@given(st.lists(st.integers(0, 2**64), max_size=5))
def test_mix_is_64_bits(values: list[int]) -> None:
    assert 0 <= text.mix(*values) < 2**64


@given(seed=st.integers(0, 2**32), token=st.integers(0, 2**20), rank=st.integers(0, 20))
def test_logprobs_are_never_positive_and_fall_with_rank(seed: int, token: int, rank: int) -> None:
    assert 0 >= text.logprob(seed, token, rank) > text.logprob(seed, token, rank + 1)
