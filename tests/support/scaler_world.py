"""A fleet in miniature for the scaler's tests: what is decided from, and what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stoker.scaler.core.decide import decide
from stoker.scaler.core.values import Decisions, Deployment, Desired, Fleet, Load, Replica, Standing


@dataclass
class World:
    """The records as they stand; `step` decides and persists."""

    now: float = 0.0
    deployments: dict[str, Deployment] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    desired: dict[str, Desired] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)

    def fleet(self) -> Fleet:
        return Fleet(
            deployments=tuple(self.deployments.values()),
            replicas=tuple(self.replicas.values()),
            desired=tuple(self.desired.values()),
            loads=dict(self.loads),
        )

    def step(self) -> Decisions:
        decisions = decide(self.fleet(), self.now)
        for name in decisions.removed:
            del self.desired[name]
        for desired in decisions.changed:
            self.desired[desired.deployment] = desired
        return decisions


def play(world: World, line: str) -> Iterator[str]:
    """Runs one line of a scenario and yields what it shows; see tests/scenarios/scaler."""
    verb, *words = line.split()
    plain = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    match verb:
        case "deploy":
            name, generation = plain[0], int(options.get("generation", "1"))
            world.deployments[name] = Deployment(name, generation, int(options["replicas"]))
        case "undeploy":
            del world.deployments[plain[0]]
        case "replica" | "load" | "leaves" | "gone":
            for name in plain:
                _change_replica(world, verb, name, options)
        case "pass":
            world.now += float(plain[0])
        case "restart":
            # A new leader knows what is persisted and what replicas report; loads come again with time.
            world.loads.clear()
        case "round":
            yield from describe(world.step())
        case _:
            raise AssertionError(f"no such verb: {verb}")


def _change_replica(world: World, verb: str, name: str, options: Mapping[str, str]) -> None:
    match verb:
        case "replica":
            world.replicas[name] = _replica(name, options)
        case "load":
            world.loads[name] = _load(world.now, options)
        case "leaves":
            world.replicas[name] = replace(world.replicas[name], leaving=True)
        case _:
            del world.replicas[name]


def describe(decisions: Decisions) -> Iterator[str]:
    for name in decisions.removed:
        yield f"{name}: no longer desired"
    for desired in decisions.changed:
        victims = f", first to go: {' '.join(desired.victims)}" if desired.victims else ""
        yield f"{desired.deployment}: {desired.replicas} ({desired.reason}, generation {desired.generation}){victims}"
    if decisions.quiet:
        yield "nothing"


def _replica(name: str, options: Mapping[str, str]) -> Replica:
    return Replica(name, name.rpartition("-")[0], Standing[options.get("is", "ready").upper()])


def _load(now: float, options: Mapping[str, str]) -> Load:
    known = {key: int(value) for key, value in options.items()}
    return Load(now, known.get("running"), known.get("waiting"), known.get("queued"))
