"""Which registry an agent speaks to: highest random weight, so that a lost registry moves only its own agents."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def order(node_id: str, endpoints: Iterable[str]) -> list[str]:
    """The endpoints in this node's order of preference; every process computes the same."""

    def weight(endpoint: str) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(f"{node_id}\0{endpoint}".encode()), endpoint

    return sorted(set(endpoints), key=weight, reverse=True)
