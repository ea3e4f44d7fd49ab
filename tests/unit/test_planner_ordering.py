"""The one order of names, by which the planner breaks its ties."""

from __future__ import annotations

from itertools import permutations

from stoker.planner.core.ordering import natural


def test_numbers_in_names_count_as_numbers() -> None:
    assert sorted(["r1-n10", "r1-n9", "r10-n1", "r2-n1"], key=natural) == ["r1-n9", "r1-n10", "r2-n1", "r10-n1"]


def test_names_that_differ_in_zeros_alone_have_an_order_too() -> None:
    orders = {tuple(sorted(names, key=natural)) for names in permutations(["n1", "n01", "n001"])}
    assert len(orders) == 1, "what comes first must not depend on what was named first"


def test_a_number_of_any_length_and_in_any_script_is_a_key() -> None:
    names = ["n" + "9" * 10_000, "n²", "n٣", "", "7"]
    assert len(sorted(names, key=natural)) == len(names)
