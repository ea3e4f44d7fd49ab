"""Where on the ring a prefix lives: what routers agree by when no digest tells.

Where digests are trusted, the ring is asked once, with the first block that nobody holds: there the prompt leaves
what the fleet shares, however long that is. Where they are not, nobody knows how much of a prompt is shared, so the
ring is asked at several depths that double: whatever two prompts share, they have the homes of half of it in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from stoker.router.core.explanation import RANKS
from stoker.router.core.fleet import Fleet
from stoker.router.core.match import Match
from stoker.router.core.panel import Panel
from stoker.router.core.seats import Floats
from stoker.router.core.values import Reason, Request

_DOUBLING = tuple(1 << power for power in range(64))
MISSES = (Reason.SPILL, Reason.RING)
HOT = 32.0
"""A prefix so many times as long as what nobody holds is copied in a ring order of its own."""


def unseen(fleet: Fleet, panel: Panel, found: Match) -> Floats | None:
    """Return how little each candidate's digest tells: 0 for all, 1 for nothing. None where it is 0 everywhere."""
    if found.trust is None and fleet.index.told >= len(fleet.replicas):
        return None
    trust = 1.0 if found.trust is None else found.trust
    column: Floats = 1.0 - np.where(fleet.index.known(panel.seats), trust, 0.0)
    return column if column.any() else None


def key(request: Request, found: Match, unseen: Floats | None, anywhere: int) -> int:
    """Return the key by which the ring is asked for the home of what nobody holds.

    It is that of the first block which no digest shows. A system prompt common to all cannot send everything to one
    home, and routers that see the same digests agree. Where most digests are unseen it is the deepest doubling.
    A prompt without keys has its home `anywhere`.
    """
    keys = request.keys
    if not keys:
        return anywhere
    return key_of(keys, found.shown, blind=unseen is not None and bool(2.0 * unseen.sum() > len(unseen)))


def key_of(keys: Sequence[int], shown: int, *, blind: bool) -> int:
    """Return the same of some keys, of which digests show so many; `blind` where most digests are unseen."""
    if blind:
        return keys[(1 << (len(keys).bit_length() - 1)) - 1]
    return keys[min(shown, len(keys) - 1)]


def row(key: int, fleet: Fleet, panel: Panel) -> int | None:
    """Return the first candidate on the ring from `key` on, None where there is none among the first few."""
    home = panel.rows.get(fleet.ring.home(key) or "")
    if home is not None:
        return home
    return next((panel.rows[name] for name in islice(fleet.ring.order(key), RANKS) if name in panel.rows), None)


def tokens(request: Request, fleet: Fleet, panel: Panel) -> dict[int, int]:
    """Return how many tokens of the prompt candidates are the homes of, by row."""
    keys, rows = request.keys, panel.rows
    depths = _DOUBLING[: len(keys).bit_length()]
    asked = [keys[depth - 1] for depth in depths]
    found: dict[int, int] = {}
    for key, depth, name in zip(asked, depths, fleet.ring.homes(asked), strict=True):
        home = rows.get(name or "")
        if home is None:
            home = row(key, fleet, panel)
        if home is not None:
            found[home] = depth * request.block_size
    return found


def depths(request: Request, fleet: Fleet, panel: Panel) -> Floats:
    """Return the same as a column."""
    column = np.zeros(len(panel))
    for home, length in tokens(request, fleet, panel).items():
        column[home] = length
    return column
