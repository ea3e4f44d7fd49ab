"""Every candidate of a decision, told one by one only to those who ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from stoker.router.core.seats import Floats
from stoker.router.core.values import Candidate

RANKS = 8
"""Places on the ring worth telling apart: beyond them, load alone decides."""
ALIKE_DIGITS = 3
"""Costs in seconds that are the same in so many decimals are a tie."""


class Explanation(Sequence[Candidate]):
    """The candidates, best first. Few decisions are looked at: it keeps columns until somebody asks."""

    __slots__ = ("_columns", "_ids", "_ranks")

    def __init__(self, ids: tuple[str, ...], columns: tuple[Floats, ...], ranks: Mapping[int, int]) -> None:
        """`columns` are the fields of Candidate from `cost` to `trust`; `ranks` are places on the ring by row."""
        self._ids = ids
        self._columns = columns
        self._ranks = ranks

    def _told(self) -> list[Candidate]:
        cost, load, weight, bound, exact, speculative, cached, trust = self._columns
        views = map(
            Candidate,
            self._ids,
            cost.tolist(),
            load.tolist(),
            weight.tolist(),
            bound.tolist(),
            exact.astype(int).tolist(),
            speculative.astype(int).tolist(),
            cached.tolist(),
            trust.tolist(),
            (self._ranks.get(row, RANKS) for row in range(len(self._ids))),
        )
        return sorted(views, key=lambda view: (round(view.cost, ALIKE_DIGITS), view.ring_rank))

    def cheapest(self, count: int) -> list[str]:
        """Return the first few ids of those that were open, by cost alone: cheaper than telling all."""
        cost, load, weight, bound = self._columns[:4]
        opened = (load + weight <= bound).nonzero()[0]
        ranked = opened[cost[opened].argsort(kind="stable")[:count]]
        return [self._ids[row] for row in ranked.tolist()]

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._told())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._told()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
