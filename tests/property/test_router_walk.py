"""How far replicas get along a prompt: strides over long prefixes find what looking at every key finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.router.core.walk import Source, Translation, walk

_depths = st.lists(st.integers(0, 400), min_size=1, max_size=6)


def held(depths: list[int]) -> dict[int, int]:
    """Who holds each key, where replica number n holds the first so many."""
    masks: dict[int, int] = {}
    for number, depth in enumerate(depths):
        for key in range(depth):
            masks[key] = masks.get(key, 0) | 1 << number
    return masks


def reached(runs: list[tuple[int, int]], number: int) -> int:
    return max((depth for depth, mask in runs if mask >> number & 1), default=0)


@given(_depths, st.integers(0, 400))
def test_one_source(depths: list[int], keys: int) -> None:
    runs = walk(list(range(keys)), (1 << len(depths)) - 1, [Source(held(depths).get)])
    assert [reached(runs, number) for number in range(len(depths))] == [min(depth, keys) for depth in depths]
    assert runs == sorted(runs)


@given(_depths, _depths, st.integers(0, 400))
def test_two_sources_of_which_one_counts_differently(first: list[int], second: list[int], keys: int) -> None:
    replicas = max(len(first), len(second))
    first, second = [each + [0] * (replicas - len(each)) for each in (first, second)]
    turned = Translation({1 << number: 1 << (replicas - 1 - number) for number in range(replicas)})
    sources = [Source(held(first).get), Source(held(second[::-1]).get, turned)]
    runs = walk(list(range(keys)), (1 << replicas) - 1, sources)
    wanted = [min(keys, max(pair)) for pair in zip(first, second, strict=True)]
    assert [reached(runs, number) for number in range(replicas)] == wanted


@given(_depths, st.integers(0, 400))
def test_what_is_known_is_not_doubted(depths: list[int], known: int) -> None:
    runs = walk(list(range(400)), (1 << len(depths)) - 1, [Source(held(depths).get)], [(known, 1)] if known else [])
    wanted = [max(known, depths[0]), *depths[1:]] if depths[0] >= known else [known, *depths[1:]]
    assert [reached(runs, number) for number in range(len(depths))] == wanted
