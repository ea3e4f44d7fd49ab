"""Which prefixes of replicas that go are computed again elsewhere before anybody asks for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

LEAST_CHANCE = 0.5
"""A prefix is not warmed for less: it would be computed for nobody more often than for somebody."""


@dataclass(frozen=True, slots=True)
class Held:
    """A block of a replica that goes: what comes before it in its prompt, the chance that it is asked for again in
    time, who else has it (replicas that stay), and one that goes and has it. `parent` 0 begins a prompt."""

    parent: int
    chance: float
    elsewhere: frozenset[str] = frozenset()
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Warming:
    """One prefix to compute: the block it ends with, who has it, where, the tokens that this takes there, and those
    of them that are expected to be asked for."""

    leaf: int
    holder: str
    successor: str
    tokens: float
    gain: float


def plan(
    blocks: Mapping[int, Held],
    successors: Collection[str],
    block_tokens: float,
    budget_tokens: float,
    least_chance: float = LEAST_CHANCE,
) -> tuple[Warming, ...]:
    """The prefixes worth most for their tokens, best first, at most `budget_tokens` in all.

    `blocks` are all that the replicas that go hold, by key. Each prefix goes whole to one successor: the one
    that already has most of it, then the one with the least to do. A block in `blocks` that a successor has, or
    will have by an earlier prefix, costs nothing there.
    """
    if not successors:
        return ()
    has: dict[str, set[int]] = {name: set() for name in successors}
    work = dict.fromkeys(successors, 0.0)
    for key, block in blocks.items():
        for name in block.elsewhere:
            if name in has:
                has[name].add(key)
    warmed: set[int] = set()
    left, plans = budget_tokens, []
    for leaf in _by_worth(blocks):
        chain = _chain(leaf, blocks)
        fresh = [key for key in chain if key not in warmed and not blocks[key].elsewhere]
        gain = block_tokens * sum(blocks[key].chance for key in fresh)
        successor = min(has, key=lambda name: (sum(key not in has[name] for key in chain), work[name], name))
        tokens = block_tokens * sum(key not in has[successor] for key in chain)
        if not fresh or tokens > left or gain < tokens * least_chance:
            continue
        left -= tokens
        work[successor] += tokens
        warmed.update(fresh)
        has[successor].update(chain)
        plans.append(Warming(leaf, blocks[leaf].holder, successor, tokens, gain))
    return tuple(plans)


def _by_worth(blocks: Mapping[int, Held]) -> list[int]:
    """Ends of prefixes, those first whose rarest block is asked for most likely.

    A block is asked for no more often than the one before it, so a prefix ends where the chance falls steeply.
    """
    best_child: dict[int, float] = {}
    for block in blocks.values():
        best_child[block.parent] = max(best_child.get(block.parent, 0.0), block.chance)
    ends = [key for key, block in blocks.items() if best_child.get(key, 0.0) < block.chance / 2]
    return sorted((key for key in ends if not blocks[key].elsewhere), key=lambda key: (-blocks[key].chance, key))


def _chain(leaf: int, blocks: Mapping[int, Held]) -> list[int]:
    chain = []
    while leaf in blocks:
        chain.append(leaf)
        leaf = blocks[leaf].parent
        if len(chain) > len(blocks):  # parents are learnt by hearsay: a ring of them must not hold us
            break
    return chain
