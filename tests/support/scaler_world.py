"""A fleet in miniature for the scaler's tests: what is decided from, and what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_type_hints

from xxhash import xxh3_64_intdigest

from stoker.common.blocks import SAMPLE
from stoker.scaler.core.decide import decide
from stoker.scaler.core.policy import Kind, Policy, Schedule
from stoker.scaler.core.signals import Capacity, History, Minute, Sample, Startup, Wanted
from stoker.scaler.core.values import (
    Because,
    Decision,
    Decisions,
    Deployment,
    Desired,
    Fleet,
    Load,
    Replica,
    Standing,
)
from stoker.scaler.core.warmth import Warmth, Worth

ROUND_S = 2.0
NEVER = float("inf")
BLOCK_TOKENS = 512
MONDAY_S = 4 * 86_400.0
"""Wall-clock second of the scenarios' beginning: a Monday, midnight."""


@dataclass
class Known:
    """What is known of one deployment, and how its replicas start."""

    policy: Policy = field(default_factory=Policy)
    samples: list[Sample] = field(default_factory=list)
    minutes: list[Minute] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    changed_at: float | None = None
    capacity: Capacity = field(default_factory=Capacity)
    startup: Startup = field(default_factory=Startup)
    signals: dict[str, float] | None = None
    """Of the next samples; None: nothing is reported."""
    starts_s: float | None = None
    """Decisions are carried out, and a start takes so long; None: the story says what becomes of them."""
    last_told: tuple[object, ...] = ()


@dataclass
class World:
    """The records as they stand; `step` decides and persists."""

    now: float = 0.0
    deployments: dict[str, Deployment] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    desired: dict[str, Desired] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    known: defaultdict[str, Known] = field(default_factory=lambda: defaultdict(Known))
    ready_at: dict[str, float] = field(default_factory=dict)
    warmths: defaultdict[str, Warmth] = field(default_factory=lambda: defaultdict(partial(Warmth, BLOCK_TOKENS)))

    def fleet(self) -> Fleet:
        return Fleet(
            deployments=tuple(self.deployments.values()),
            replicas=tuple(self.replicas.values()),
            desired=tuple(self.desired.values()),
            loads=dict(self.loads),
        )

    def histories(self) -> dict[str, History]:
        return {
            name: History(
                tuple(known.samples),
                tuple(known.minutes),
                tuple(known.wanted),
                known.capacity,
                known.startup,
                known.changed_at,
                MONDAY_S + self.now,
            )
            for name, known in self.known.items()
        }

    def worths(self) -> dict[str, Worth]:
        return {name: warmth.worth(self.now) for name, warmth in self.warmths.items()}

    def step(self) -> Decisions:
        policies = {name: known.policy for name, known in self.known.items()}
        decisions = decide(
            self.fleet(), self.now, policies=policies, histories=self.histories(), worths=self.worths()
        )
        for name in decisions.removed:
            del self.desired[name]
        for desired in decisions.changed:
            self.desired[desired.deployment] = desired
        for decision in decisions.made:
            known = self.known[decision.deployment]
            if decision.wanted is not None:
                known.wanted.append(decision.wanted)
            if decision.replicas != decision.before:
                known.changed_at = self.now
        return decisions

    def sample(self) -> None:
        """What is reported now of every deployment that reports."""
        for name, known in self.known.items():
            mine = [r for r in self.replicas.values() if r.deployment == name and not r.leaving]
            ready = sum(replica.standing is Standing.READY for replica in mine)
            starting = sum(replica.standing in (Standing.PENDING, Standing.STARTING) for replica in mine)
            if known.signals is not None:
                known.samples.append(Sample(self.now, ready, starting, **known.signals))

    def carry_out(self, decision: Decision) -> None:
        """What planner and agents do: victims go at once, what is missing starts."""
        known = self.known[decision.deployment]
        if known.starts_s is None:
            return
        for victim in decision.victims:
            del self.replicas[victim]
        mine = [replica for replica in self.replicas.values() if replica.deployment == decision.deployment]
        number = 0
        for _ in range(decision.replicas - len(mine)):
            while f"{decision.deployment}-{number}" in self.replicas:
                number += 1
            name = f"{decision.deployment}-{number}"
            self.replicas[name] = Replica(name, decision.deployment, Standing.STARTING, since=self.now)
            self.ready_at[name] = self.now + known.starts_s

    def pass_time(self, seconds: float) -> None:
        minutes_before, self.now = self.now // 60.0, self.now + seconds
        for known in self.known.values():
            if known.minutes and known.signals is not None and self.now // 60.0 > minutes_before:
                names = ("arrivals_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "hit_rate")
                at = MONDAY_S + 60.0 * minutes_before
                known.minutes.append(Minute(at, *(known.signals.get(name, 0.0) for name in names)))
        for name, at in list(self.ready_at.items()):
            if name not in self.replicas:
                del self.ready_at[name]
            elif at <= self.now:
                self.replicas[name] = replace(self.replicas[name], standing=Standing.READY, since=at)
                del self.ready_at[name]


def play(world: World, line: str) -> Iterator[str]:
    """Runs one line of a scenario and yields what it shows; see tests/scenarios/scaler."""
    verb, *words = line.split()
    plain = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    match verb:
        case "deploy":
            for name in plain:
                generation = int(options.get("generation", "1"))
                world.deployments[name] = Deployment(name, generation, int(options["replicas"]))
        case "undeploy":
            del world.deployments[plain[0]]
        case "asks":
            _ask(world, plain, options)
        case "replica" | "load" | "leaves" | "gone" | "stuck":
            for name in plain:
                _change_replica(world, verb, name, options)
        case "pass":
            world.pass_time(float(plain[0]))
        case "restart":
            # A new leader knows what is persisted and what replicas report; all else comes again with time.
            world.loads.clear()
            for known in world.known.values():
                known.samples.clear()
                known.wanted.clear()
        case "round":
            yield from describe(world.step())
        case "watch":
            yield from _watch(world, float(plain[0]))
        case _:
            _learn(world, verb, plain, options)


def _ask(world: World, plain: list[str], options: Mapping[str, str]) -> None:
    """`asks USER REPLICA… blocks=N times=N every=S`: the last time now; the replicas hold what was asked for."""
    user, *replicas = plain
    warmth = world.warmths[replicas[0].rpartition("-")[0]]
    names = (f"{user} {number}".encode() for number in range(int(options["blocks"]) // SAMPLE))
    keys = [SAMPLE * (xxh3_64_intdigest(name) // SAMPLE) for name in names]
    for number in reversed(range(int(options.get("times", "1")))):
        warmth.used(keys, world.now - number * float(options.get("every", "60")))
    for replica in replicas:
        warmth.stored(replica, keys, world.now)


def _learn(world: World, verb: str, plain: list[str], options: Mapping[str, str]) -> None:
    known = world.known[plain[0]]
    match verb:
        case "policy":
            policy = replace(known.policy, kind=Kind(plain[1]))
            own = {name: name if hasattr(policy, name.split(".")[0]) else f"{plain[1]}.{name}" for name in options}
            known.policy = with_settings(policy, {own[name]: value for name, value in options.items()})
        case "schedule":
            days = frozenset(map(int, options["days"].split(",")))
            begins, ends = (3_600.0 * float(hour) for hour in options["hours"].split("-"))
            most = int(options["most"]) if "most" in options else None
            schedules = (*known.policy.schedules, Schedule(days, begins, ends, int(options["least"]), most))
            known.policy = replace(known.policy, schedules=schedules)
        case "signals":
            silent = plain[1:] == ["none"]
            known.signals = None if silent else {name: float(value) for name, value in options.items()}
        case "capacity":
            known.capacity = with_settings(known.capacity, options)
        case "starts":
            seconds = float(plain[1]) if plain[1] != "never" else NEVER
            known.starts_s = seconds
            known.startup = Startup(seconds, seconds) if seconds < NEVER else Startup()
        case "busy":
            _busy_days(world, known, options)
        case _:
            raise AssertionError(f"no such verb: {verb}")


def _busy_days(world: World, known: Known, options: Mapping[str, str]) -> None:
    """Some days of minutes with a busy stretch in each, until now."""
    begins, ends = (float(hour) for hour in options["hours"].split("-"))
    wall = MONDAY_S + world.now
    for number in range(int(1_440 * float(options["days"])), 0, -1):
        at = wall - 60.0 * number
        rate = float(options["rate"] if begins <= at % 86_400.0 / 3_600.0 < ends else options["else"])
        known.minutes.append(Minute(at, rate, 1_000.0 * rate, 100.0 * rate, 0.5))


def with_settings(value: Any, settings: Mapping[str, str]) -> Any:
    """A dataclass with some fields changed, named as in `pace.settle_s=60`."""
    for name, text in settings.items():
        first, _, rest = name.partition(".")
        old = getattr(value, first)
        if rest:
            value = replace(value, **{first: with_settings(old, {rest: text})})
        elif "str" in str(get_type_hints(type(value))[first]):
            value = replace(value, **{first: text})
        elif isinstance(old, bool):
            value = replace(value, **{first: text == "true"})
        else:
            value = replace(value, **{first: int(text) if isinstance(old, int) else float(text)})
    return value


def _watch(world: World, seconds: float) -> Iterator[str]:
    """Rounds for so long; tells each decision that changes a count or why it stands."""
    end = world.now + seconds
    while world.now < end:
        world.sample()
        world.loads = {name: replace(load, seen_at=world.now) for name, load in world.loads.items()}
        for decision in world.step().made:
            world.carry_out(decision)
            known = world.known[decision.deployment]
            told = (decision.replicas, *(because.reason for because in decision.because))
            if told != known.last_told:
                known.last_told = told
                yield f"{world.now:>5g} s  {told_of(decision)}"
        world.pass_time(ROUND_S)


def told_of(decision: Decision) -> str:
    before = decision.before if decision.before is not None else "-"
    count = f"{before} -> {decision.replicas}" if before != decision.replicas else f"{before}"
    steps = "; ".join(_step(because, first=place == 0) for place, because in enumerate(decision.because))
    victims = f"  without {' '.join(decision.victims)}" if decision.victims else ""
    return f"{decision.deployment} {count}{victims}: {steps}"


def _step(because: Because, *, first: bool) -> str:
    """A reason with its numbers; of a policy only the need, of what is unknown all."""
    need = because.numbers.get("need") if first else None
    numbers = {"need": need} if need is not None else {k: v for k, v in because.numbers.items() if k != "need"}
    shown = ", ".join(f"{name} {'unknown' if value is None else f'{value:.4g}'}" for name, value in numbers.items())
    return f"{because.reason} ({shown})" if shown else because.reason


def _change_replica(world: World, verb: str, name: str, options: Mapping[str, str]) -> None:
    match verb:
        case "replica":
            world.replicas[name] = replace(_replica(name, options), since=world.now)
        case "load":
            world.loads[name] = _load(world.now, options)
        case "leaves":
            world.replicas[name] = replace(world.replicas[name], leaving=True)
        case "stuck":
            world.ready_at.pop(name, None)
        case _:
            del world.replicas[name]


def describe(decisions: Decisions) -> Iterator[str]:
    for name in decisions.removed:
        yield f"{name}: no longer desired"
    for desired in decisions.changed:
        victims = f", first to go: {' '.join(desired.victims)}" if desired.victims else ""
        yield f"{desired.deployment}: {desired.replicas} ({desired.reason}, generation {desired.generation}){victims}"
    for made in decisions.made:
        if made.victims in [desired.victims for desired in decisions.changed]:
            for name, cost in made.costs.items():
                if cost.lost_tokens:
                    yield f"  {name} would lose {cost.lost_tokens:.0f} tokens, {cost.lost_s:.1f} s of prefill"
    if decisions.quiet:
        yield "nothing"


def _replica(name: str, options: Mapping[str, str]) -> Replica:
    standing = Standing[options.get("is", "ready").upper()]
    return Replica(name, name.rpartition("-")[0], standing, domain=options.get("rack", ""))


def _load(now: float, options: Mapping[str, str]) -> Load:
    known = {key: int(value) for key, value in options.items()}
    return Load(now, known.get("running"), known.get("waiting"), known.get("queued"))
