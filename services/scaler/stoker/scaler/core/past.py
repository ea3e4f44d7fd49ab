"""Days of demand, minute by minute, in columns: looked at whole, and added up, without touching each minute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from stoker.scaler.core.signals import Minute

Series = NDArray[np.float64]
T = TypeVar("T")

_REMEMBERED = 16
_HALF_S = 30.0
"""Of a minute: two deployments need not begin theirs in the same instant."""


class Past(Sequence[Minute]):
    """Minutes, oldest first, that never change; each field of `Minute` is an array here.

    So the load of a minute is written once, and computed for all of them. What follows from the minutes alone is
    remembered with them (`once`): it is asked for in each round, and they change only as a minute ends.
    """

    __slots__ = ("_found", "arrivals_per_s", "at", "decode_tokens_per_s", "hit_rate", "prefill_tokens_per_s")

    def __init__(self, at: Series, arrivals: Series, prefill: Series, decode: Series, hit_rate: Series) -> None:
        self.at = at
        self.arrivals_per_s = arrivals
        self.prefill_tokens_per_s = prefill
        self.decode_tokens_per_s = decode
        self.hit_rate = hit_rate
        self._found: dict[Hashable, object] = {}

    @classmethod
    def of(cls, minutes: Iterable[Minute]) -> Past:
        """These minutes; a past is its own."""
        if isinstance(minutes, Past):
            return minutes
        rows = [(m.at, m.arrivals_per_s, m.prefill_tokens_per_s, m.decode_tokens_per_s, m.hit_rate) for m in minutes]
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 5).T.copy())

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, place: int) -> Minute: ...
    @overload
    def __getitem__(self, place: slice) -> Past: ...
    def __getitem__(self, place: int | slice) -> Minute | Past:
        columns = [column[place] for column in self.columns]
        return Past(*columns) if isinstance(place, slice) else Minute(*map(float, columns))

    @property
    def columns(self) -> tuple[Series, Series, Series, Series, Series]:
        """The fields of `Minute`, in its order."""
        return self.at, self.arrivals_per_s, self.prefill_tokens_per_s, self.decode_tokens_per_s, self.hit_rate

    def between(self, first: float, end: float) -> Past:
        """The minutes that began at the wall-clock second `first` or later, and before `end`."""
        begin, stop = np.searchsorted(self.at, (first, end))
        return self[int(begin) : int(stop)]

    def followed_by(self, minute: Minute) -> Past:
        """These minutes and one more."""
        pairs = zip(self.columns, Past.of([minute]).columns, strict=True)
        return Past(*(np.concatenate(pair) for pair in pairs))

    def once(self, find: Callable[..., T], *arguments: Hashable) -> T:
        """`find` of these minutes and the arguments; computed the first time that it is asked for."""
        asked = (find, *arguments)
        if asked not in self._found:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[asked] = find(self, *arguments)
        return self._found[asked]  # type: ignore[return-value]


NOTHING = Past.of(())


def summed(own: Past, others: Iterable[Past]) -> Past:
    """The minutes of `own` with what came in the same minutes to the others; hits over what was looked up."""
    arrivals, prefill, decode = own.arrivals_per_s, own.prefill_tokens_per_s, own.decode_tokens_per_s
    hits = own.hit_rate * prefill
    for other in others:
        if not len(other):
            continue
        places = np.minimum(np.searchsorted(other.at, own.at - _HALF_S), len(other) - 1)
        apart = other.at[places] - own.at
        there = (apart >= -_HALF_S) & (apart < _HALF_S)
        its_prefill = np.where(there, other.prefill_tokens_per_s[places], 0.0)
        arrivals = arrivals + np.where(there, other.arrivals_per_s[places], 0.0)
        decode = decode + np.where(there, other.decode_tokens_per_s[places], 0.0)
        hits, prefill = hits + other.hit_rate[places] * its_prefill, prefill + its_prefill
    hit_rate = np.divide(hits, prefill, out=own.hit_rate.copy(), where=prefill > 0.0)
    return Past(own.at, arrivals, prefill, decode, hit_rate)
