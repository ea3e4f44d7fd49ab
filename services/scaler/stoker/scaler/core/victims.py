"""Which replicas go first when there are too many."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from stoker.scaler.core.values import Load, Replica, Standing

_DIGITS = re.compile(r"\d+")


def choose(
    replicas: Sequence[Replica],
    surplus: int,
    loads: Mapping[str, Load],
    now: float,
    *,
    fresh_s: float,
    before: Sequence[str] = (),
    values: Mapping[str, float | None] | None = None,
) -> tuple[str, ...]:
    """The `surplus` replicas to remove, best first.

    Those that serve nothing go first (failing, then pending, starting, unhealthy), then of the ready ones the
    one with the least work: removing the one with the backlog would delay everything queued there. Work that
    is unknown or older than `fresh_s` seconds counts as the most. Equals go by name, the highest ordinal first.

    Load changes with every report, so a choice once made (`before`) stands while it still serves: the same
    number of victims, all of them still there, and none of them ready while others are not.
    """
    if surplus <= 0:
        return ()
    staying = [replica for replica in replicas if not replica.leaving]
    ranked = sorted(staying, key=lambda replica: _cost(replica, loads.get(replica.id), now, fresh_s))
    chosen = ranked[:surplus]
    if _stands(before, {replica.id: replica for replica in staying}, chosen):
        return tuple(before)
    return tuple(replica.id for replica in chosen)


def _cost(replica: Replica, load: Load | None, now: float, fresh_s: float) -> tuple[object, ...]:
    if replica.standing is not Standing.READY:
        return (replica.standing, _name_last_first(replica.id))
    return (replica.standing, *_work(load, now, fresh_s), _name_last_first(replica.id))


def _work(load: Load | None, now: float, fresh_s: float) -> tuple[bool, int, int]:
    """(unknown, requests, queued prompt tokens): compares as the least work first."""
    if load is None or load.running is None or load.waiting is None or now - load.seen_at > fresh_s:
        return (True, 0, 0)
    return (False, load.running + load.waiting, load.queued_prefill_tokens or 0)


def _name_last_first(name: str) -> tuple[int, str]:
    digits = _DIGITS.findall(name.rpartition("-")[2])
    return (-int(digits[-1]) if digits else 0, name)


def _stands(before: Sequence[str], staying: Mapping[str, Replica], chosen: Collection[Replica]) -> bool:
    if len(before) != len(chosen) or any(name not in staying for name in before):
        return False
    ready_before = sum(staying[name].standing is Standing.READY for name in before)
    return ready_before <= sum(replica.standing is Standing.READY for replica in chosen)
