"""Requests that wait in the router because the replica they want is busy.

An engine serves its queue in order of arrival; what was sent can neither be reordered nor sent elsewhere. So a
replica is sent what keeps it busy and no more, and the rest waits here: each time a replica has room, one goes.
Higher priority goes first; within one, a tenant that is due; within those, whoever has least to compute, by what the
caches hold by then. Waiting counts against computing, so nobody is overtaken for ever by its like: after w seconds
only those go first whose prefill is shorter by more than `aging` · w. Where all of one kind want replicas without
room, the next kind is asked: room is never left idle for order's sake.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from random import Random

from msgspec.structs import replace

from stoker.common.errors import Exhausted, StokerError
from stoker.router.core.decide import copies, decide
from stoker.router.core.fairness import Fairness
from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Decision, Request

RETRY_S = 0.05
"""Ask for grants at least this often while requests wait: room can come by time alone, or by a report."""

# Of those that wait, so many of the first and so many of the others are considered: the cost of a grant is bounded.
_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Grant:
    """A request whose turn has come: its decision, or the error that ends it."""

    ticket: int
    decision: Decision | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    request: Request
    since: float


_Choose = Callable[[Request], Decision]


class AdmissionQueue:
    """The requests of one pool that wait for a replica with room, oldest first; `limit` bounds newcomers."""

    def __init__(self, limit: int, fairness: Fairness, longest_s: float = float("inf")) -> None:
        """`fairness` outlives the queue, which may exist only while somebody waits.

        `longest_s`: how long a request waits at most; its owner sees to that.
        """
        self._limit = limit
        self._fairness = fairness
        self._longest_s = longest_s
        self._waiting: dict[int, _Waiting] = {}
        self._bands: dict[int, dict[str, dict[int, _Waiting]]] = {}  # priority → tenant → in order of arrival
        self._refused: list[Grant] = []
        self._next_other = 0
        self._next = 1
        self._prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Iterator[tuple[Request, float]]:
        """Those that wait, each with when it came."""
        for each in self._waiting.values():
            yield each.request, each.since

    def join(self, request: Request, fleet: Fleet, now: float, *, since: float | None = None) -> int:
        """Wait; returns a ticket. `since` is when it first came, for one that was sent already and came back.

        Raises Exhausted (reason QUEUE_FULL), with the time in which those that wait can be computed; not for one that
        came back, which was let in before.
        """
        if since is None and len(self._waiting) >= self._limit:
            self._make_room(request.tenant, self._full(fleet, now))
        ticket = self._next
        self._next += 1
        waiting = _Waiting(ticket, request, now if since is None else since)
        band = self._bands.setdefault(request.priority, {})
        if request.tenant not in band:
            self._fairness.arrive(request.tenant, band)
            band[request.tenant] = {}
        band[request.tenant][ticket] = waiting
        if since is not None:
            line = sorted(band[request.tenant].items(), key=lambda item: item[1].since)
            band[request.tenant] = dict(line)
        self._waiting[ticket] = waiting
        self._prompt_tokens += request.prompt_tokens
        return ticket

    def _full(self, fleet: Fleet, now: float) -> Exhausted:
        return Exhausted(
            f"{len(self._waiting)} requests wait for a replica of this model, as many as may; "
            "try again later, or scale the deployment up",
            reason="QUEUE_FULL",
            retry_after_s=max(0.1, self.drain_s(fleet, now)),
        )

    def _make_room(self, tenant: str, full: Exhausted) -> None:
        """The last to come of the tenant with most waiting gives way; raises `full` where that is `tenant`."""
        counts = Counter(waiting.request.tenant for waiting in self._waiting.values())
        greedy, most = counts.most_common(1)[0]
        if counts[tenant] + 1 >= most:
            raise full
        last = next(ticket for ticket, w in reversed(self._waiting.items()) if w.request.tenant == greedy)
        self.leave(last)
        self._refused.append(Grant(last, error=full))

    def leave(self, ticket: int) -> None:
        """Wait no longer: granted, cancelled or timed out. Harmless when repeated."""
        gone = self._waiting.pop(ticket, None)
        if gone is None:
            return
        self._prompt_tokens -= gone.request.prompt_tokens
        band = self._bands[gone.request.priority]
        del band[gone.request.tenant][ticket]
        if not band[gone.request.tenant]:
            del band[gone.request.tenant]
            self._fairness.depart(gone.request.tenant)
        if not band:
            del self._bands[gone.request.priority]

    def drain_s(self, fleet: Fleet, now: float) -> float:
        """Return in how many seconds all that wait are gone: computed, if nothing is cached, or given up.

        What the replicas have still to compute goes before them.
        """
        rates = {name: rate for name, rate in fleet.rates.items() if fleet.replicas[name].ready}
        before = sum(fleet.load.backlog(name, rate, now) * rate for name, rate in rates.items())
        rate = sum(rates.values())
        return min(self._longest_s, (before + self._prompt_tokens) / rate) if rate else 1.0

    def grant(self, fleet: Fleet, now: float, rng: Random, *, explain: bool = False) -> Grant | None:
        """Take the request that goes next out of the queue, or that must go for others; None while all must wait.

        The caller dispatches it, then asks again: each grant changes the load that the next one sees.
        """
        if self._refused:
            return self._refused.pop()
        able = [name for name, replica in fleet.replicas.items() if replica.ready and not replica.draining]
        free = frozenset(name for name in able if not fleet.busy(name, now))
        if able and not free:
            return None
        choose = partial(decide, fleet=fleet, now=now, rng=rng, explain=explain)
        first = self._first()
        held: dict[int, int] = {}
        for group in (*first, self._others()):
            granted = self._shortest(group, fleet, now, choose, held)
            if granted is not None:
                return granted
        return self._spilled(list(chain.from_iterable(first)), held, free, fleet, now, choose)

    def _shortest(
        self, group: list[_Waiting], fleet: Fleet, now: float, choose: _Choose, held: dict[int, int]
    ) -> Grant | None:
        """Of those whose replica has room, the one that has least to compute there.

        Notes in `held`, by ticket, the last block that the replica which the others wait for holds of their prompts.
        """
        best: tuple[float, _Waiting, Decision] | None = None
        for waiting in group:
            head_start = fleet.config.aging * (now - waiting.since)
            if best is not None and best[0] <= -head_start:
                continue  # not even a prompt with nothing to compute would go before
            try:
                decision = choose(waiting.request)
            except Exception as error:  # noqa: BLE001 - it is the waiter's, not that of whoever made room
                self.leave(waiting.ticket)
                return Grant(waiting.ticket, error=error)
            if fleet.busy(decision.replica, now):
                depth = decision.cached_tokens // waiting.request.block_size
                if depth:
                    held[waiting.ticket] = waiting.request.keys[depth - 1]
                continue
            seconds = decision.prefill_tokens / fleet.rates[decision.replica]
            score = seconds - head_start
            if best is None or score < best[0]:
                best = (score, waiting, decision)
        return None if best is None else self._granted(best[1], best[2])

    def _spilled(
        self,
        line: Sequence[_Waiting],
        held: Mapping[int, int],
        free: frozenset[str],
        fleet: Fleet,
        now: float,
        choose: _Choose,
    ) -> Grant | None:
        """Of those who have waited as long as a miss costs, the first that a replica can take which nobody wants.

        What waits here is no load anywhere: without this, all that share a hot prefix wait for the one replica that
        holds it, while the others do nothing. One more copy serves all of them, so their waits count together,
        against a miss for each copy there is: copies follow demand.
        """
        free = frozenset(name for name in free - fleet.retiring if not fleet.health.ejected(name, now))
        if not free:
            return None
        rate = min(fleet.rates[name] for name in free)
        elsewhere = frozenset(fleet.replicas.keys() - free)
        waited: defaultdict[int, float] = defaultdict(float)
        for waiting in line:
            waited[held.get(waiting.ticket, -waiting.ticket)] += now - waiting.since
        for waiting in line:
            request = waiting.request
            tokens = rate * waited[held.get(waiting.ticket, -waiting.ticket)]
            miss = fleet.config.miss_weight * request.prompt_tokens
            if miss > tokens or miss * copies(request, fleet, now) > tokens:
                continue
            try:
                decision = choose(replace(request, exclude=request.exclude | elsewhere))
            except StokerError:
                continue  # none of these can serve it
            if not decision.over_bound:
                return self._granted(waiting, decision)
        return None

    def _granted(self, waiting: _Waiting, decision: Decision) -> Grant:
        request = waiting.request
        self._fairness.charge(request.tenant, decision.prefill_tokens, request.output_tokens, request.weight)
        self.leave(waiting.ticket)
        return Grant(waiting.ticket, decision)

    def _first(self) -> list[list[_Waiting]]:
        """Those whose turn it is, as many as are considered, in groups of which each goes before the next."""
        groups, left = [], _WINDOW
        for priority in sorted(self._bands):
            band = self._bands[priority]
            for tenants in self._fairness.due(band):
                groups.append(list(islice(_in_turn([band[tenant].values() for tenant in tenants]), left)))
                left -= len(groups[-1])
        return groups

    def _others(self) -> list[_Waiting]:
        """Some of all that wait, in turn: the first may all want the same replica, and those behind them another."""
        if len(self._waiting) <= _WINDOW:
            return []
        start = self._next_other % len(self._waiting)
        self._next_other = start + _WINDOW
        return list(islice(self._waiting.values(), start, start + _WINDOW))


def _in_turn(lines: Iterable[Iterable[_Waiting]]) -> Iterator[_Waiting]:
    """The first of each line, then the second of each, until all are through."""
    iterators = [iter(line) for line in lines]
    while iterators:
        going = []
        for iterator in iterators:
            first = next(iterator, None)
            if first is not None:
                yield first
                going.append(iterator)
        iterators = going
