"""Every candidate of a decision, told one by one only to those who ask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from stoker.router.core.seats import Floats
from stoker.router.core.values import Candidate

RANKS = 8
"""Places on the ring worth telling apart: beyond them, load alone decides."""
ALIKE_DIGITS = 3
"""Costs in seconds that are the same in so many decimals are a tie."""


class Explanation(Sequence[Candidate]):
    """The candidates, best first: by cost, and by their places on the ring where that is the same."""

    __slots__ = ("ids",)

    def __init__(self, ids: tuple[str, ...]) -> None:
        self.ids = ids
        """Every candidate's id; one object for as long as the same replicas may serve."""

    @abstractmethod
    def _told(self) -> list[Candidate]:
        """Return the candidates in their order."""

    @abstractmethod
    def cheapest(self, count: int) -> list[str]:
        """Return the first few ids of those that were open, by cost alone: cheaper than telling all."""

    def __len__(self) -> int:
        return len(self.ids)

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


class Columns(Explanation):
    """Told one by one only to those who ask. Few decisions are looked at: it keeps columns until somebody does."""

    __slots__ = ("_bound", "_evidence", "_floor", "_weights")

    def __init__(
        self,
        ids: tuple[str, ...],
        weights: tuple[Floats, Floats, Floats],
        floor: float,
        bound: Callable[[], Floats],
        evidence: Callable[[], tuple[tuple[Floats, ...], Mapping[int, int]]],
    ) -> None:
        """`weights` are the fields `cost`, `load` and `weight` of Candidate, by row.

        No bound is below `floor`, in tokens. `bound` makes that one; `evidence` those from `exact` to `trust`, and
        the places on the ring by row. Both must hold all that they need as it was.
        """
        super().__init__(ids)
        self._weights = weights
        self._floor = floor
        self._bound = bound
        self._evidence = evidence

    def _told(self) -> list[Candidate]:
        cost, load, weight = self._weights
        (exact, speculative, cached, trust), ranks = self._evidence()
        views = map(
            Candidate,
            self.ids,
            cost.tolist(),
            load.tolist(),
            weight.tolist(),
            self._bound().tolist(),
            exact.astype(int).tolist(),
            speculative.astype(int).tolist(),
            cached.tolist(),
            trust.tolist(),
            (ranks.get(row, RANKS) for row in range(len(self.ids))),
        )
        return sorted(views, key=preference)

    def cheapest(self, count: int) -> list[str]:
        """Return the first few ids of those that were open, by cost alone: two sums and one sort."""
        cost, load, weight = self._weights
        tokens = load + weight
        if tokens.max() <= self._floor:
            return [self.ids[row] for row in cost.argsort(kind="stable")[:count].tolist()]
        opened = (tokens <= self._bound()).nonzero()[0]
        ranked = opened[cost[opened].argsort(kind="stable")[:count]]
        return [self.ids[row] for row in ranked.tolist()]


def preference(view: Candidate) -> tuple[float, int]:
    """Return what candidates are sorted by."""
    return round(view.cost, ALIKE_DIGITS), view.ring_rank
