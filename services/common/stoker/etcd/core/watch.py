"""The bookkeeping of a watch: exact history while etcd has it, an exact difference when it has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from stoker.etcd.core.types import Delta, KeyValue


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key at `revision`; `kv` is None for a deletion."""

    revision: int
    key: str
    kv: KeyValue | None


class Resume(Enum):
    """How a watch that was interrupted goes on."""

    CONTINUE = auto()
    # History is gone but revisions still count: what changed shows in mod_revision.
    RELOAD = auto()
    # The store itself went back or was replaced: revisions prove nothing.
    RELOAD_ALL = auto()


def resume(known_revision: int, known_cluster: int, revision: int, cluster: int) -> Resume:
    """Decide from a linearizable read whether history continues where we left it.

    A store restored from a backup has a lower revision; watching it from ours + 1 would wait, in silence,
    until it had caught up. A follower that merely lags cannot show this: the read is linearizable.
    """
    if cluster != known_cluster or revision < known_revision:
        return Resume.RELOAD_ALL
    return Resume.CONTINUE


def diff(known: Mapping[str, int], kvs: Sequence[KeyValue], revision: int, how: Resume) -> Delta:
    """What leads from the `known` keys (key → mod_revision) to `kvs`. Both fields may be empty."""
    present = {kv.key for kv in kvs}
    every = how is Resume.RELOAD_ALL
    return Delta(
        revision=revision,
        puts=tuple(kv for kv in kvs if every or known.get(kv.key) != kv.mod_revision),
        deletes=tuple(sorted(key for key in known if key not in present)),
    )


def complete(held: Sequence[Event], events: Sequence[Event], *, more: bool) -> tuple[list[Event], list[Event]]:
    """Split what has arrived into whole revisions, and the rest to hold until the next fragment.

    etcd cuts large responses anywhere, also inside a transaction. Only the last revision seen can be
    incomplete, so no more than one transaction is ever held.
    """
    arrived = [*held, *events]
    if not more or not arrived:
        return arrived, []
    last = arrived[-1].revision
    cut = next(i for i, event in enumerate(arrived) if event.revision == last)
    return arrived[:cut], arrived[cut:]


def deltas(events: Iterable[Event], after: int) -> list[Delta]:
    """One delta for each revision past `after`; what was already delivered is dropped."""
    fresh = (event for event in events if event.revision > after)
    result = []
    for revision, group in groupby(fresh, key=lambda event: event.revision):
        changes = list(group)
        result.append(
            Delta(
                revision=revision,
                puts=tuple(event.kv for event in changes if event.kv is not None),
                deletes=tuple(event.key for event in changes if event.kv is None),
            )
        )
    return result


def advance(known: dict[str, int], delta: Delta) -> None:
    """Apply a delta to the known keys (key → mod_revision), in place."""
    for key in delta.deletes:
        known.pop(key, None)
    for kv in delta.puts:
        known[kv.key] = kv.mod_revision
