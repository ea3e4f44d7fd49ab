"""Give up what can be judged only once all is placed: too large a share in one domain, KV that no uplink carries."""

from __future__ import annotations

from fractions import Fraction

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement.state import State, most_in_one
from stoker.planner.core.placement.values import Need
from stoker.planner.core.placement.worth import kv_shares, stays


def prune(state: State) -> set[str]:
    """Release new replicas until every limit holds; returns the deployments that lost some."""
    gone: set[str] = set()
    standing = {old.replica for old in state.problem.standing if stays(state, old)}
    while True:
        victim = _too_many(state, standing) or _choking(state, standing)
        if victim is None:
            return gone
        gone.add(state.release(victim).deployment)


def sound(base: State, state: State) -> bool:
    """Whether what `state` has beyond `base` keeps every limit that can be told of a whole placement."""
    ground = state.ground
    for before, now in zip(base.slack, state.slack, strict=True):
        if now < min(0, before):
            return False
    for node, left in state.power_left.items():
        if left < min(0, base.power_left[node]):
            return False
    for node, rate in ground.fabric.rates.items():
        if state.sent[node] > max(rate, base.sent[node]):
            return False
    for number, domain in enumerate(ground.fabric.domains):
        if state.rings[number] > max(domain.up, base.rings[number]):
            return False
    for need in state.problem.needs:
        kinds, most = state.bounds(need)
        before_all, now_all = base.touched[need.deployment], state.touched[need.deployment]
        if any(key[0] in kinds and n > max(most, before_all[key]) for key, n in now_all.items()):
            return False
    return True


def _too_many(state: State, standing: set[str]) -> str | None:
    """A replica in a domain that would take more with it than may be."""
    for need in state.problem.needs:
        have = state.counts[need.deployment]
        if have < 2 or have >= need.replicas:
            continue
        kinds = {kind.value for kind in need.spread_over}
        most = most_in_one(need, have)
        for key, number in sorted(state.touched[need.deployment].items()):
            if key[0] in kinds and number > most:
                inside = [name for name in _fresh(state, need, standing) if key in _keys(state, name)]
                if inside:
                    return inside[-1]
    return None


def _choking(state: State, standing: set[str]) -> str | None:
    """A replica whose KV goes over an uplink that cannot carry all that is sent over it."""
    domains = state.ground.fabric.domains
    out, coming = list(state.rings), list(state.rings)
    for need in state.problem.needs:
        for tier in range(state.ground.tiers):
            for number, share in kv_shares(state, need, tier).items():
                if need.pair is not None and isinstance(number, int):
                    out[number] += int(max(Fraction(0), share) * need.pair.rate)
                    coming[number] += int(max(Fraction(0), -share) * need.pair.rate)
    for number, domain in enumerate(domains):
        if domain.up and max(out[number], coming[number]) > domain.up:
            for need in state.problem.needs:
                if need.pair is None or need.pair.deployment not in state.needs:
                    continue
                for side in (need, state.needs[need.pair.deployment]):
                    for name in reversed(_fresh(state, side, standing)):
                        members = state.placed[name].members
                        if any(number in state.ground.fabric.of.get(member.node, ()) for member in members):
                            return name
    return None


def _fresh(state: State, need: Need, standing: set[str]) -> list[str]:
    return sorted(
        (p.replica for p in state.placed.values() if p.deployment == need.deployment and p.replica not in standing),
        key=natural,
    )


def _keys(state: State, replica: str) -> set[tuple[str, str]]:
    return state.keys(member.node for member in state.placed[replica].members)
