"""When to renew a lease, and when to stop believing in it. All times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """What one grant or renewal bought.

    `sent` is when the request left, not when the answer came: etcd counts the TTL from some moment in
    between, so `sent + ttl` is the last moment at which the lease is surely alive.
    """

    sent: float
    ttl: float

    @property
    def deadline(self) -> float:
        """From here on the lease counts as lost, whatever a late answer says."""
        return self.sent + self.ttl

    @property
    def renew_at(self) -> float:
        """A third of the TTL in: two more tries fit before the deadline."""
        return self.sent + self.ttl / 3

    def attempt_timeout(self, now: float) -> float:
        """How long one try may take: a third of the TTL, so that a mute server leaves time for another.

        Never past the deadline, and 0 when that has passed.
        """
        return max(0.0, min(self.ttl / 3, self.deadline - now))


def extend(current: Term, sent: float, ttl: float) -> Term:
    """The term after a renewal: answers may arrive out of order, so the later deadline holds."""
    renewed = Term(sent, ttl)
    return renewed if renewed.deadline > current.deadline else current
