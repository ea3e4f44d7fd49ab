"""One round of scaling."""

from __future__ import annotations

from collections import defaultdict

from stoker.scaler.core import count, victims
from stoker.scaler.core.values import Decisions, Deployment, Desired, Fleet, Replica


def decide(fleet: Fleet, now: float, *, load_fresh_s: float = 10.0) -> Decisions:
    """The desired counts of all deployments at `now` (monotonic seconds), and which of them are news.

    A pure function of what is persisted and seen: a scaler that has just started decides as the one before it
    would have. Running it again on its own outcome changes nothing. The caller must hold rather than call
    this with a view it does not trust: a deployment missing from `fleet` counts as deleted.
    """
    before = {desired.deployment: desired for desired in fleet.desired}
    replicas: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in fleet.replicas:
        replicas[replica.deployment].append(replica)

    decided = []
    for deployment in sorted(fleet.deployments, key=lambda deployment: deployment.name):
        mine = replicas[deployment.name]
        decided.append(_decide_one(deployment, mine, before.get(deployment.name), fleet, now, load_fresh_s))
    known = {deployment.name for deployment in fleet.deployments}
    return Decisions(
        desired=tuple(decided),
        changed=tuple(desired for desired in decided if desired != before.get(desired.deployment)),
        removed=tuple(sorted(before.keys() - known)),
    )


def _decide_one(
    deployment: Deployment,
    replicas: list[Replica],
    before: Desired | None,
    fleet: Fleet,
    now: float,
    load_fresh_s: float,
) -> Desired:
    wanted, reason = count.fixed(deployment)
    surplus = sum(not replica.leaving for replica in replicas) - wanted
    going = victims.choose(
        replicas, surplus, fleet.loads, now, fresh_s=load_fresh_s, before=before.victims if before else ()
    )
    return Desired(deployment.name, deployment.generation, wanted, going, reason)
