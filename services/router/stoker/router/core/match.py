"""How much of a prompt each replica of a panel holds, and what that is worth."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stoker.router.core.fleet import Fleet
from stoker.router.core.panel import Panel
from stoker.router.core.seats import Floats, mask_of
from stoker.router.core.values import Request
from stoker.router.core.walk import Runs, among, depth_column


class Match(NamedTuple):
    """Columns by row of the panel; depths in blocks, 0 for a replica whose keys are of another block size."""

    exact: Floats
    """What digests show, in whatever tier."""
    believed: Floats
    """What trusted digests show, and speculation on top."""
    cached: Floats
    """What both are worth, in tokens, after tier and confidence."""
    trust: Floats | None
    """The confidence in each digest; None where it is 1 in all."""
    shown: int
    """The most that any replica of the fleet holds by a trusted digest, in blocks."""
    deepest: int
    """The same with speculation."""


def match(request: Request, fleet: Fleet, panel: Panel, now: float) -> Match:
    """Look a prompt up in the fleet's digests and among recent dispatches."""
    width, seats = fleet.seats.width, panel.seats
    tiers = fleet.index.runs(request.keys)
    *_, shown = [], *tiers.values()
    trusts = fleet.index.trusts(now)
    # Speculation continues a digest that is fully trusted; beside a doubtful one it stands alone.
    sure = shown if trusts is None else among(shown, mask_of(trusts == 1.0))
    guessed = fleet.speculation.runs(request.keys, sure)
    speaks = None if panel.alike == request.block_size else panel.block_sizes == request.block_size

    def by_row(runs: Runs) -> Floats:
        column = depth_column(runs, width)[seats]
        return column if speaks is None else column * speaks

    size = float(request.block_size)
    exact = held = np.zeros(len(panel))
    for tier, runs in tiers.items():
        # Each tier adds what the faster ones lack, at its own credit.
        before, exact = exact, by_row(runs)
        held = held + fleet.config.tier_credit[tier] * size * (exact - before)
    trust = None if trusts is None else trusts[seats]
    believed = exact if trust is None else np.where(trust == 1.0, exact, 0.0)
    worth, credit = held, fleet.config.speculative_credit * size
    if guessed:
        believed = np.maximum(believed, by_row(guessed))
        # Then comes what only speculation vouches for.
        worth = held + credit * np.maximum(0.0, believed - exact)
    if trust is not None:
        worth = np.where(trust == 1.0, worth, np.maximum(trust * held, credit * believed))
    # The last token is always computed: the engine needs its logits.
    cached = np.minimum(worth, max(0.0, request.prompt_tokens - 1.0))
    deepest = _deepest(sure)
    return Match(exact, believed, cached, trust, deepest, max(deepest, _deepest(guessed)))


def _deepest(runs: Runs) -> int:
    return runs[-1][0] if runs else 0
