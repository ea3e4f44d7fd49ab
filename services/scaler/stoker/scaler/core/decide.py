"""One round of scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.scaler.core import demand, limits, variants, victims
from stoker.scaler.core import policies as kinds
from stoker.scaler.core.limits import Room
from stoker.scaler.core.policies.windows import most_wanted
from stoker.scaler.core.policy import Caps, Kind, Policy
from stoker.scaler.core.signals import History, Wanted
from stoker.scaler.core.values import (
    Because,
    Decision,
    Decisions,
    Deployment,
    Desired,
    Fleet,
    Need,
    Reason,
    Replica,
    Standing,
)
from stoker.scaler.core.variants import Variant
from stoker.scaler.core.warmth import Worth

_FIXED = Policy()
_NOTHING = History()
_NO_NEED = Need(None, Reason.FIXED)


def decide(
    fleet: Fleet,
    now: float,
    *,
    policies: Mapping[str, Policy] | None = None,
    histories: Mapping[str, History] | None = None,
    worths: Mapping[str, Worth] | None = None,
    load_fresh_s: float = 10.0,
) -> Decisions:
    """The desired counts of all deployments at `now` (monotonic seconds), and which of them are news.

    `policies` and `histories` are by deployment: without a policy its specification's count stands, without a
    history nothing is known of it, without a worth nothing of what its caches hold; that matters only where ready
    replicas are to go, which the decision's `costs` tell.

    A pure function of what is persisted and seen: a scaler that has just started decides as the one before it
    would have. Running it again on its own outcome changes nothing. The caller must hold rather than call
    this with a view it does not trust: a deployment missing from `fleet` counts as deleted.
    """
    before = {desired.deployment: desired for desired in fleet.desired}
    made: dict[str, Decision] = {}
    for group in _groups(fleet, before, policies or {}, histories or {}):
        for member, outcome in _decided(group, now):
            made[member.name] = _with_victims(
                member, outcome, fleet, now, (worths or {}).get(member.name), load_fresh_s
            )
    ordered = sorted(fleet.deployments, key=lambda deployment: deployment.name)
    desired = tuple(_persisted(made[each.name], each, before.get(each.name)) for each in ordered)
    return Decisions(
        made=tuple(made[each.name] for each in ordered),
        desired=desired,
        changed=tuple(each for each in desired if each != before.get(each.deployment)),
        removed=tuple(sorted(before.keys() - made.keys())),
    )


@dataclass(frozen=True, slots=True)
class _Member:
    """A deployment with what is known of it; `history` tells the demand of its whole group."""

    deployment: Deployment
    policy: Policy
    history: History
    replicas: Sequence[Replica]
    before: Desired | None

    @property
    def name(self) -> str:
        return self.deployment.name

    @property
    def fixed(self) -> bool:
        return self.policy.kind is Kind.FIXED


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The count of one member, why, and what its policy wanted."""

    replicas: int
    because: tuple[Because, ...]
    wanted: Wanted | None = None


def _groups(
    fleet: Fleet, before: Mapping[str, Desired], policies: Mapping[str, Policy], histories: Mapping[str, History]
) -> list[list[_Member]]:
    """The deployments by what shares one demand; those of a fixed count share only the caps."""
    replicas: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in fleet.replicas:
        if not replica.leaving:
            replicas[replica.deployment].append(replica)
    groups: defaultdict[tuple[str, str], list[_Member]] = defaultdict(list)
    for each in fleet.deployments:
        policy, history = policies.get(each.name, _FIXED), histories.get(each.name, _NOTHING)
        member = _Member(each, policy, history, replicas[each.name], before.get(each.name))
        groups["group" if policy.group else "alone", policy.group or each.name].append(member)
    return [_with_shared_demand(group) for group in groups.values()]


def _with_shared_demand(group: list[_Member]) -> list[_Member]:
    sharing = [m for m in group if not m.fixed and (m.replicas or m.history.samples)]
    if len(sharing) < 2:
        return group
    joined = demand.shared({member.name: member.history for member in sharing}, _weights(sharing))
    return [replace(member, history=joined.get(member.name, member.history)) for member in group]


def _weights(sharing: Sequence[_Member]) -> dict[str, float]:
    """What one replica of each carries: by its target, else by its KV cache, all alike where that is not known."""
    if all(member.policy.kind is Kind.CONCURRENCY for member in sharing):
        return {m.name: m.policy.concurrency.target * m.policy.concurrency.utilisation for m in sharing}
    caches = {member.name: member.history.capacity.kv_tokens or 0.0 for member in sharing}
    return caches if all(caches.values()) else dict.fromkeys(caches, 1.0)


def _decided(group: Sequence[_Member], now: float) -> Iterator[tuple[_Member, _Outcome]]:
    prepared = {member.name: _prepared(member, now) for member in group}
    sharing = [member for member in group if not member.fixed]
    shares = variants.share(
        [variant for _, variant, _ in prepared.values()],
        _caps(group),
        keep=0 if all(_may_end(member, now) for member in sharing) else 1,
        woken=max((limits.waiting(member.history.samples) for member in sharing), default=0.0),
    )
    for member in group:
        need, _, because = prepared[member.name]
        share = shares[member.name]
        wanted = None if need.replicas is None else Wanted(now, need.replicas, need.correction)
        yield member, _Outcome(share.count, _told([*because, *share.because]), wanted)


def _told(because: Sequence[Because]) -> tuple[Because, ...]:
    """The steps, but of two with one reason after the other only the later."""
    return tuple(
        step
        for step, after in zip(because, [*because[1:], None], strict=True)
        if not after or step.reason != after.reason
    )


def _prepared(member: _Member, now: float) -> tuple[Need, Variant, list[Because]]:
    """What it needs, within which limits it may have it, and the reasons so far."""
    policy, history, stood = member.policy, member.history, member.before
    if member.fixed:
        count = member.deployment.replicas
        held = Room(count, count, Because(Reason.FIXED), Because(Reason.FIXED))
        return (
            _NO_NEED,
            Variant(member.name, count, held, price=policy.price, least=count, own=True),
            [Because(Reason.FIXED)],
        )

    need = kinds.need(policy, history, now)
    because = [Because(need.reason, {"need": need.replicas, **need.numbers})]
    if stood is None:
        because.append(Because(Reason.NEW, {"replicas": member.deployment.replicas}))
    count = stood.replicas if stood else member.deployment.replicas
    ready = sum(replica.standing is Standing.READY for replica in member.replicas)
    settled = None
    if need.replicas is not None:
        settled = max(need.replicas, most_wanted(history.wanted, now - policy.pace.settle_s))
    bounds = limits.bounds_at(policy, history.now_wall)
    start = count if policy.paused else min(max(count, bounds.least), bounds.most)
    if policy.paused:
        because.append(Because(Reason.PAUSED))
    elif start > count:
        because.append(Because(bounds.least_reason, {"least": bounds.least}))
    elif start < count:
        because.append(Because(bounds.most_reason, {"most": bounds.most}))
    variant = Variant(
        member.name,
        start,
        limits.room(policy, bounds, history, start, ready, now),
        need.replicas,
        settled,
        policy.pace.margin,
        policy.price,
        ready,
        lost=_lost(member, start, now),
        least=bounds.least,
        paused=policy.paused,
    )
    return need, variant, because


def _lost(member: _Member, count: int, now: float) -> int:
    """How many of the `count` replicas failed, or should long have been ready or at least been placed."""
    overdue_s, changed_at = limits.overdue_s(member.history), member.history.changed_at
    unplaced = count - len(member.replicas) if changed_at is not None and now - changed_at > overdue_s else 0
    lost = sum(_is_lost(replica, now, overdue_s) for replica in member.replicas)
    return min(count, lost + max(0, unplaced))


def _is_lost(replica: Replica, now: float, overdue_s: float) -> bool:
    if replica.standing in (Standing.PENDING, Standing.STARTING):
        return replica.since is not None and now - replica.since > overdue_s
    return replica.standing is Standing.FAILING


def _may_end(member: _Member, now: float) -> bool:
    policy, history = member.policy, member.history
    least = limits.bounds_at(policy, history.now_wall).least
    return least == 0 and limits.idle(history.samples, policy.bounds.idle_s, now, policy.fresh_s)


def _caps(group: Sequence[_Member]) -> Caps:
    """The tightest of what the members' policies say of their group."""
    costs = [cap for member in group if (cap := member.policy.caps.per_hour) is not None]
    powers = [cap for member in group if (cap := member.policy.caps.power_w) is not None]
    return Caps(min(costs, default=None), min(powers, default=None))


def _with_victims(
    member: _Member, outcome: _Outcome, fleet: Fleet, now: float, worth: Worth | None, fresh_s: float
) -> Decision:
    before, overdue_s, history = member.before, limits.overdue_s(member.history), member.history
    choice = victims.choose(
        [replace(r, standing=Standing.FAILING) if _is_lost(r, now, overdue_s) else r for r in member.replicas],
        len(member.replicas) - outcome.replicas,
        fleet.loads,
        now,
        fresh_s=fresh_s,
        before=before.victims if before else (),
        worth=worth,
        rates=victims.Rates.of(history),
        domain_least=member.policy.bounds.domain_least,
    )
    because = outcome.because
    if choice.kept:
        least = member.policy.bounds.domain_least
        because = (*because, Because(Reason.DOMAIN, {"domain_least": least, "kept": choice.kept}))
    return Decision(
        member.name,
        before.replicas if before else None,
        outcome.replicas + choice.kept,
        choice.victims,
        because,
        outcome.wanted,
        choice.costs,
    )


def _persisted(decision: Decision, deployment: Deployment, before: Desired | None) -> Desired:
    """The record of a decision: a new reason alone is no news."""
    record = Desired(decision.deployment, deployment.generation, decision.replicas, decision.victims, decision.reason)
    if before is not None and before == replace(record, reason=before.reason):
        return before
    return record
