"""One pooled LRU cache as the yardstick of hit rates."""

from __future__ import annotations

from stoker.bench.pooled import hit_rate

BLOCK = 4


def prompt(first: int, blocks: int = 2, more: int = 1) -> list[int]:
    return list(range(first, first + blocks * BLOCK + more))


def test_what_comes_again_is_found_in_whole_blocks() -> None:
    assert hit_rate([prompt(0), prompt(0)], BLOCK, 100) == 8 / 18


def test_the_last_token_is_always_computed() -> None:
    """As engines do: of a prompt that ends with a block that block is computed anew."""
    assert hit_rate([prompt(0, more=0), prompt(0, more=0)], BLOCK, 100) == 4 / 16


def test_the_least_recently_used_goes() -> None:
    assert hit_rate([prompt(0), prompt(100), prompt(0)], BLOCK, 2) == 0
    assert hit_rate([prompt(0), prompt(100), prompt(0)], BLOCK, 4) == 8 / 27


def test_nothing_asked_is_nothing_found() -> None:
    assert hit_rate([], BLOCK, 4) == 0
