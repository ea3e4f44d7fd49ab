"""Load in tokens, per replica, as this router sees it.

    load = max(own, reported + own dispatches the report missed − own completions since the report)
           + other routers' dispatches the report missed

`own` is what this router has in flight there: a floor under whatever an old or wrong report says. Of the others'
requests no completion is heard: the next report has them, and where none comes they age.

The backlog is another thing: the prefill that routers have sent to a replica and that is not done yet, in seconds.
Where this router sees the first token it knows the end exactly; elsewhere (answers that are no stream, requests of
other routers) the prefill is taken to run off at the replica's own rate.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from stoker.router.core.seats import Floats, Seats, widened

# Changes kept one by one between two reports; older ones beyond this count as reported.
_LOG_LIMIT = 4_096
# Four reports' time.
_OVERHEARD_S = 2.0


@dataclass(slots=True)
class _Account:
    seat: int | None  # None once the replica left
    own: float = 0.0
    reported: float = 0.0
    reported_at: float = float("-inf")
    since: float = 0.0
    log: deque[tuple[float, float]] = field(default_factory=deque)
    pending: float = 0.0  # prefill whose first token will be seen
    drained_at: float = float("-inf")  # when all other prefill will have run off
    others: float = 0.0
    overheard: list[tuple[float, float]] = field(default_factory=list)  # when dispatched, tokens; by time

    def forget_until(self, at: float) -> None:
        """Drop what others dispatched up to `at`."""
        del self.overheard[: bisect_right(self.overheard, (at, float("inf")))]
        self.others = sum(tokens for _, tokens in self.overheard)

    @property
    def load(self) -> float:
        seen = self.reported + self.since
        return (seen if seen > self.own else self.own) + self.others

    def drain(self, seconds: float, now: float) -> float:
        """Count prefill whose end nobody will tell; returns when it will be done."""
        self.drained_at = max(self.drained_at, now) + seconds
        return self.drained_at

    def change(self, tokens: float, now: float) -> None:
        self.own += tokens
        self.since += tokens
        self.log.append((now, tokens))
        if len(self.log) > _LOG_LIMIT:
            _, oldest = self.log.popleft()
            self.reported += oldest
            self.since -= oldest


@dataclass(slots=True)
class _Flight:
    account: _Account  # not the replica's name: one that left and came back has another
    prefill: float  # load until the first token
    kv: float
    at: float
    pending: float  # the part of the account's that is this flight's
    drains_s: float = 0.0
    drained_at: float = 0.0


class LoadLedger:
    """In-flight requests and load reports. Every dispatch is released once; a second release is a no-op."""

    def __init__(self, seats: Seats | None = None) -> None:
        self._seats = seats or Seats()
        self._loads: Floats = np.zeros(self._seats.width)  # every account's load, by seat
        self._oldest = float("inf")  # nothing that was overheard is older
        self._accounts: dict[str, _Account] = {}
        self._flights: dict[int, _Flight] = {}
        self._next = 1

    @property
    def in_flight(self) -> int:
        """Requests dispatched and not yet released."""
        return len(self._flights)

    def load(self, replica: str, now: float = float("-inf")) -> float:
        """Return a replica's load in tokens, 0 when nothing is known of it; by `now` what was overheard ages."""
        self._age(now)
        account = self._accounts.get(replica)
        return account.load if account else 0.0

    def loads(self, now: float) -> Floats:
        """Return the loads of all replicas in tokens, by seat."""
        self._age(now)
        self._loads = widened(self._loads, self._seats.width, 0.0)
        return self._loads

    def _age(self, now: float) -> None:
        aged = now - _OVERHEARD_S
        if self._oldest > aged:
            return
        self._oldest = float("inf")
        for account in self._accounts.values():
            if account.overheard and account.overheard[0][0] <= aged:
                account.forget_until(aged)
                self._show(account)
            if account.overheard:
                self._oldest = min(self._oldest, account.overheard[0][0])

    def _show(self, account: _Account) -> None:
        if account.seat is not None:
            self._loads[account.seat] = account.load

    def _account(self, replica: str) -> _Account:
        account = self._accounts.get(replica)
        if account is None:
            account = self._accounts[replica] = _Account(self._seats.number(replica))
            self._loads = widened(self._loads, self._seats.width, 0.0)
        return account

    def _change(self, account: _Account, tokens: float, now: float) -> None:
        account.change(tokens, now)
        self._show(account)

    def own(self, replica: str) -> float:
        """Return the tokens that this router itself has in flight on a replica."""
        account = self._accounts.get(replica)
        return account.own if account else 0.0

    def backlog(self, replica: str, rate: float, now: float) -> float:
        """Return the seconds of prefill still before a newcomer, at `rate` tokens per second."""
        account = self._accounts.get(replica)
        if account is None:
            return 0.0
        return account.pending / rate + max(0.0, account.drained_at - now)

    def dispatch(
        self,
        replica: str,
        prefill: float,
        kv: float,
        now: float,
        *,
        step: float = 0.0,
        drains_s: float | None = None,
    ) -> int:
        """Count a request: `prefill` tokens until its first token, `kv` tokens until it ends. Returns its id.

        `step` is load until its first token that is no prefill, in tokens. `drains_s` is how long its prefill takes
        where the first token will not be seen.
        """
        flight = self._next
        self._next += 1
        account = self._account(replica)
        if drains_s is None:
            held = _Flight(account, prefill + step, kv, now, prefill)
        else:
            held = _Flight(account, prefill + step, kv, now, 0.0, drains_s, account.drain(drains_s, now))
        account.pending += held.pending
        self._flights[flight] = held
        self._change(account, held.prefill + kv, now)
        return flight

    def first_token(self, flight: int, now: float) -> None:
        """The prefill is done: only the KV load stays. Harmless when repeated or late."""
        held = self._flights.get(flight)
        if held and held.prefill:
            self._change(held.account, -held.prefill, now)
            held.account.pending -= held.pending
            held.prefill = held.pending = 0.0

    def release(self, flight: int, now: float) -> None:
        """The request ended, however it ended. Harmless when repeated."""
        held = self._flights.pop(flight, None)
        if held:
            self._change(held.account, -(held.prefill + held.kv), now)
            held.account.pending -= held.pending
            if held.drained_at > now:
                # Done before its time, or refused: those behind it are as much earlier.
                held.account.drained_at -= min(held.drains_s, held.drained_at - now)

    def hand_over(self, flight: int, now: float) -> None:
        """Leave a request to its replica's reports, as nobody tells its end; without one since its dispatch: release.

        Those reports have it while it runs, so it is counted neither twice nor for ever. Harmless when repeated.
        """
        held = self._flights.get(flight)
        if held is None or held.account.reported_at <= held.at:
            self.release(flight, now)
            return
        del self._flights[flight]
        held.account.own -= held.prefill + held.kv
        held.account.pending -= held.pending
        self._show(held.account)

    def overhear(
        self,
        replica: str,
        tokens: float,
        at: float,
        now: float,
        *,
        drains_s: float = 0.0,
        hold_s: float = float("inf"),
    ) -> None:
        """Count what another router dispatched at `at`, unless a report has it or it has aged by `now`.

        Its prefill takes `drains_s` seconds. Routers send where no more than `hold_s` is before a newcomer: with
        more by this estimate, that was too long, and is not made longer. Else a router would wait for ever behind
        one whose prefills end sooner than it thinks.
        """
        account = self._account(replica)
        at = min(at, now)
        if account.drained_at - at <= hold_s:
            account.drain(drains_s, at)
        if at <= max(account.reported_at, now - _OVERHEARD_S) or tokens <= 0:
            return
        insort(account.overheard, (at, tokens))
        account.others += tokens
        if len(account.overheard) > _LOG_LIMIT:
            account.others -= account.overheard.pop(0)[1]
        self._oldest = min(self._oldest, at)
        self._show(account)

    def report(self, replica: str, tokens: float, seen_at: float) -> None:
        """Take the load a replica had at `seen_at` (this router's monotonic seconds); older ones are ignored."""
        account = self._account(replica)
        if seen_at < account.reported_at:
            return
        account.reported = max(0.0, tokens)
        account.reported_at = seen_at
        while account.log and account.log[0][0] <= seen_at:
            account.log.popleft()
        account.since = sum(tokens for _, tokens in account.log)
        account.forget_until(seen_at)
        self._show(account)

    def forget(self, replica: str) -> None:
        """Drop a replica that left the fleet; its flights may still be released."""
        account = self._accounts.pop(replica, None)
        if account is not None and account.seat is not None:
            self._loads[account.seat] = 0.0
            account.seat = None
