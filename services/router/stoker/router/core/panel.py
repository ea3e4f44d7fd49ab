"""The replicas that may serve one kind of request, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stoker.router.core.seats import Floats, Ints, Seats
from stoker.router.core.values import Replica


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Row by row, by id: two routers see the same rows. Holds what announcements change, no state."""

    ids: tuple[str, ...]
    rows: Mapping[str, int]
    seats: Ints
    bits: tuple[int, ...]
    """The same as masks."""
    block_sizes: Ints
    alike: int
    """The block size of all, in tokens; −1 where they differ."""
    capacity: Floats
    parts: tuple[float, ...]
    """The same one by one."""
    capacities: float
    """Their sum."""

    @classmethod
    def of(cls, replicas: Iterable[Replica], seats: Seats) -> Panel:
        """Return the panel of some replicas."""
        replicas = sorted(replicas, key=lambda replica: replica.id)
        ids = tuple(replica.id for replica in replicas)
        sizes = {replica.block_size for replica in replicas}
        seated = [seats.number(name) for name in ids]
        parts = tuple(replica.capacity for replica in replicas)
        return cls(
            ids=ids,
            rows={name: row for row, name in enumerate(ids)},
            seats=np.array(seated, np.int64),
            bits=tuple(1 << seat for seat in seated),
            block_sizes=np.array([replica.block_size for replica in replicas], np.int64),
            alike=sizes.pop() if len(sizes) == 1 else -1,
            capacity=np.array(parts, np.float64),
            parts=parts,
            capacities=sum(parts),
        )

    def __len__(self) -> int:
        return len(self.ids)
