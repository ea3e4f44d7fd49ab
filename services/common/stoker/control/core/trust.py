"""Whether a leader may decide on what it sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of a view. `age_s` is the time since a registry proved it current; `revision` is etcd's."""

    synced: bool
    vouched: bool
    age_s: float
    revision: int


class Trust:
    """What one leader's view must show before the next round. Times are monotonic seconds.

    The fence's revision is the etcd revision at which this leader's key was created. Every write of an earlier
    leader was bound to that leader's key, so it has a lower revision: a view that has reached the fence shows
    all of them, and a view that has reached this leader's last write shows all of its own.
    """

    def __init__(self, stale_after_s: float, fence_revision: int) -> None:
        self._stale_after_s = stale_after_s
        self._must_show = fence_revision
        self._failed_at = float("-inf")

    def wrote(self, revision: int) -> None:
        """A write was answered with this etcd revision."""
        self._must_show = max(self._must_show, revision)

    def failed(self, now: float) -> None:
        """A write went unanswered or was refused: some of it may have landed."""
        self._failed_at = now

    def doubt(self, sight: Sight, now: float) -> str:
        """Why not to decide on this view at `now`, in words; empty where nothing speaks against it."""
        if not sight.synced:
            return "no registry has told the whole state yet"
        if not sight.vouched:
            return "no registry vouches for the view: etcd or all registries are out of reach"
        if sight.age_s > self._stale_after_s:
            return f"the view was last proven current more than {self._stale_after_s:g} s ago"
        if sight.revision < self._must_show:
            return "the view does not show the last write yet"
        if now - sight.age_s <= self._failed_at:
            return "a failed write may have landed, and the view is older than it"
        return ""
