"""Decisions as messages, with their reasons in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.registry.core.scaling import MAX_NUMBERS, MAX_REASONS, MAX_WARMINGS
from stoker.scaler.core.values import Because, Cost, Decision, Desired, Reason
from stoker.scaler.core.warming import Warming

_MOST_VICTIMS = 16

_WORDS = {
    Reason.FIXED: "the specification's count; no policy says otherwise",
    Reason.CONCURRENCY: "requests in flight over the target, in the stable window",
    Reason.PANIC: "requests in flight rose so fast that the short window counts, and nothing is taken back",
    Reason.SATURATION: "what keeps spare KV cache and short queues",
    Reason.SLO: "what keeps the times of the SLO, by the queueing model",
    Reason.FORECAST: "what keeps them with the demand expected when a replica started now is ready",
    Reason.NEW: "nothing was decided before: the specification's count, within the bounds",
    Reason.PAUSED: "held: an operator paused it",
    Reason.UNKNOWN: "held: what the policy needs is not known yet",
    Reason.STALE: "held: what is known is too old",
    Reason.UNSEEN: "not lowered: not a whole window of demand has been seen yet",
    Reason.SETTLING: "not lowered as far: more was wanted a short while ago",
    Reason.MARGIN: "not lowered: the need is too close to the lower count",
    Reason.COOLDOWN: "held: the last change is too recent",
    Reason.STEP: "moved less than wanted: one decision may change only so much",
    Reason.COMING: "not raised: what is starting will carry it",
    Reason.LOST: "counts replicas that failed, or should long have been ready",
    Reason.VARIANT: "another deployment of the group grows or shrinks instead",
    Reason.AT_LEAST: "the lower bound",
    Reason.AT_MOST: "the upper bound",
    Reason.SCHEDULE: "a bound that holds at this hour",
    Reason.DOMAIN: "lowered less: each failure domain keeps its minimum",
    Reason.VICTIM: "costs least to lose",
    Reason.CAP_COST: "the group's money allows no more",
    Reason.CAP_POWER: "the group's power allows no more",
    Reason.IDLE: "none is needed: nothing was asked for long enough",
    Reason.NOT_IDLE: "the last one stays: something was asked for lately, or may have been",
    Reason.WOKEN: "started from none: a request waits",
}


def desired_record(
    desired: Desired,
    decision: Decision,
    fence: common_pb2.Fence | None,
    *,
    paused: bool,
    warmings: Sequence[Warming] = (),
) -> records_pb2.Desired:
    """A decision as the record to write, decided now; without a fence, as one that is not written."""
    victims = [_victim_message(name, cost) for name, cost in list(decision.costs.items())[:_MOST_VICTIMS]]
    because = [because_message(because) for because in decision.because[: MAX_REASONS - len(victims)]]
    record = records_pb2.Desired(
        deployment=desired.deployment,
        generation=desired.generation,
        replicas=desired.replicas,
        victims=desired.victims,
        reason=str(decision.reason),
        fence=fence,
        because=[*because, *victims],
        paused=paused,
        warmings=warming_messages(warmings),
    )
    record.decided_at.GetCurrentTime()
    return record


def warming_messages(warmings: Sequence[Warming]) -> list[records_pb2.Warming]:
    """The best of them, as many as a record holds."""
    return [
        records_pb2.Warming(
            leaf=warming.leaf,
            from_replica=warming.holder,
            to_replica=warming.successor,
            tokens=round(warming.tokens),
        )
        for warming in warmings[:MAX_WARMINGS]
    ]


def _victim_message(name: str, cost: Cost) -> records_pb2.Because:
    numbers = {"lost_tokens": cost.lost_tokens, "lost_s": cost.lost_s}
    numbers["drain_s"] = math.nan if cost.drain_s is None else cost.drain_s
    return records_pb2.Because(code=str(Reason.VICTIM), text=f"{name} {_WORDS[Reason.VICTIM]}", numbers=numbers)


def because_message(because: Because) -> records_pb2.Because:
    """One reason; what is unknown of its figures is NaN."""
    numbers = list(because.numbers.items())[:MAX_NUMBERS]
    return records_pb2.Because(
        code=str(because.reason),
        text=_WORDS[because.reason],
        numbers={name: math.nan if value is None else value for name, value in numbers},
    )
