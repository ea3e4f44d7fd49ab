"""One round of scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from stoker.scaler.core import count, victims
from stoker.scaler.core.policy import Policy
from stoker.scaler.core.signals import History
from stoker.scaler.core.values import Because, Decision, Decisions, Deployment, Desired, Fleet, Replica


def decide(
    fleet: Fleet,
    now: float,
    *,
    policies: Mapping[str, Policy] | None = None,
    histories: Mapping[str, History] | None = None,
    values: Mapping[str, float | None] | None = None,
    load_fresh_s: float = 10.0,
) -> Decisions:
    """The desired counts of all deployments at `now` (monotonic seconds), and which of them are news.

    `policies` and `histories` are by deployment: without a policy its specification's count stands, without a
    history nothing is known of it. `values` is by replica what its cache is worth, seconds of prefill that its
    removal would cost, None where unknown.

    A pure function of what is persisted and seen: a scaler that has just started decides as the one before it
    would have. Running it again on its own outcome changes nothing. The caller must hold rather than call
    this with a view it does not trust: a deployment missing from `fleet` counts as deleted.
    """
    before = {desired.deployment: desired for desired in fleet.desired}
    replicas: defaultdict[str, list[Replica]] = defaultdict(list)
    for replica in fleet.replicas:
        replicas[replica.deployment].append(replica)

    made, desired = [], []
    for deployment in sorted(fleet.deployments, key=lambda deployment: deployment.name):
        stood = before.get(deployment.name)
        decision = _decide_one(deployment, replicas[deployment.name], stood, fleet, now, load_fresh_s)
        made.append(decision)
        desired.append(_persisted(decision, deployment, stood))
    known = {deployment.name for deployment in fleet.deployments}
    return Decisions(
        made=tuple(made),
        desired=tuple(desired),
        changed=tuple(each for each in desired if each != before.get(each.deployment)),
        removed=tuple(sorted(before.keys() - known)),
    )


def _persisted(decision: Decision, deployment: Deployment, before: Desired | None) -> Desired:
    """The record of a decision: a new reason alone is no news."""
    record = Desired(decision.deployment, deployment.generation, decision.replicas, decision.victims, decision.reason)
    if before is not None and before == replace(record, reason=before.reason):
        return before
    return record


def _decide_one(
    deployment: Deployment,
    replicas: list[Replica],
    before: Desired | None,
    fleet: Fleet,
    now: float,
    load_fresh_s: float,
) -> Decision:
    wanted, reason = count.fixed(deployment)
    surplus = sum(not replica.leaving for replica in replicas) - wanted
    going = victims.choose(
        replicas, surplus, fleet.loads, now, fresh_s=load_fresh_s, before=before.victims if before else ()
    )
    return Decision(deployment.name, before.replicas if before else None, wanted, going, (Because(reason),))
