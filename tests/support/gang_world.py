"""One gang in simulated time: agents whose core is the real one, a registry that tells all of all at once.

Lines a scenario may say:
    gang N                   N members, all agents known
    deployed                 the assignment reaches every agent
    t SECONDS                time passes in steps of 0.1 s, decisions are carried out
    serves                   the head's engine answers health checks from now on
    silent                   … answers no more
    says dead                … answers that it is dead
    engine R dies [CODE]     the engine of rank R ends
    agent R is lost          nobody hears of rank R; its engine runs on
    agent R is back          its agent adopted what ran
    host R is lost           engine and agent of rank R are gone at once
    host R is back           an agent without memory of anything
    stubborn R               the engine of rank R ignores SIGTERM
    in flight N              requests in the head's engine
    drain / undrain          what is wanted
    removed                  the assignment is gone
    replaced                 another assignment of the same replica
    show                     where every member stands
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random

from stoker.common.backoff import Backoff
from stoker.node_agent.core import lifecycle
from stoker.node_agent.core.gang import Peer
from stoker.node_agent.core.lifecycle import Act, Exit, Member, Policy, Seen
from stoker.node_agent.core.task import Task
from stoker.node_agent.engine.protocol import Health

POLICY = Policy(
    unhealthy_after_s=5,
    restart_after_s=20,
    drain_settle_s=1,
    terminate_timeout_s=3,
    healthy_after_s=100,
    backoff=Backoff(first_s=4, max_s=60),
)
STEP_S = 0.1
DIES_AFTER_S = 0.2


class _Halves(Random):
    """Jitter without chance: always in the middle."""

    def random(self) -> float:
        return 0.5


@dataclasses.dataclass
class _Agent:
    member: Member
    alive: bool = False
    heard: bool = True
    exit: Exit | None = None
    stubborn: bool = False
    dies_at: float | None = None
    lost: bool = False


class World:
    """The gang, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.agents: dict[int, _Agent] = {}
        self.task: Task | None = None
        self.revision = 1
        self.health: Health | None = None
        self.in_flight = 0
        self.rng = _Halves()

    def task_of(self, rank: int) -> Task | None:
        return dataclasses.replace(self.task, rank=rank) if self.task is not None else None

    def peers(self, rank: int) -> dict[int, Peer]:
        return {
            other: Peer(other, agent.member.state, agent.member.attempt, agent.alive)
            for other, agent in self.agents.items()
            if other != rank and agent.heard and agent.member.task.revision == self.revision
        }

    def tick(self) -> Iterator[str]:
        """One step of every agent, each on what was reported before this step."""
        self.now = round(self.now + STEP_S, 3)
        peers = {rank: self.peers(rank) for rank in self.agents}
        for rank, agent in sorted(self.agents.items()):
            if agent.dies_at is not None and self.now >= agent.dies_at and agent.alive:
                self._die(agent, 0)
            if not agent.lost:
                yield from self._step(rank, agent, peers[rank])

    def _step(self, rank: int, agent: _Agent, peers: dict[int, Peer]) -> Iterator[str]:
        before = agent.member
        exit_, agent.exit = agent.exit, None
        seen = Seen(
            task=self.task_of(rank),
            alive=agent.alive,
            wall_ms=int(self.now * 1000),
            exit=exit_,
            health=self.health if rank == 0 and agent.alive else None,
            peers=peers,
            in_flight=self.in_flight,
            in_flight_at=self.now,
        )
        agent.member, acts = lifecycle.step(before, seen, POLICY, self.now, self.rng)
        for act in acts:
            self._do(agent, act)
            yield f"{self.now:6.1f}  rank {rank}: {act.value}" + (
                f" attempt {agent.member.attempt}" if act is Act.LAUNCH else ""
            )
        if agent.member.state is not before.state:
            why = f" ({agent.member.last_error})" if agent.member.state.value == "BACKOFF" else ""
            yield f"{self.now:6.1f}  rank {rank}: {before.state.value} → {agent.member.state.value}{why}"
        if Act.FORGET in acts:
            del self.agents[rank]

    def _do(self, agent: _Agent, act: Act) -> None:
        match act:
            case Act.LAUNCH:
                assert not agent.alive, "a second engine beside a living one"
                agent.alive, agent.dies_at = True, None
            case Act.TERMINATE if not agent.stubborn:
                agent.dies_at = self.now + DIES_AFTER_S
            case Act.KILL:
                self._die(agent, -9)

    def _die(self, agent: _Agent, code: int) -> None:
        agent.alive, agent.dies_at, agent.exit = False, None, Exit(code)


def play(world: World, line: str) -> Iterator[str]:  # noqa: C901 - one case a line
    """Carries out one line of a scenario."""
    match line.split():
        case ["gang", size]:
            world.task = Task(
                "r-0", "r", 1, "m", "m", "sim", size=int(size), startup_timeout_s=30, drain_timeout_s=10
            )
        case ["deployed"]:
            assert world.task is not None
            for rank in range(world.task.size):
                world.agents[rank] = _Agent(Member(dataclasses.replace(world.task, rank=rank), since=world.now))
        case ["t", seconds]:
            for _ in range(round(float(seconds) / STEP_S)):
                yield from world.tick()
        case ["serves"]:
            world.health = Health.SERVING
        case ["silent"]:
            world.health = Health.UNREACHABLE
        case ["says", "dead"]:
            world.health = Health.UNHEALTHY
        case ["engine", rank, "dies", *code]:
            world._die(world.agents[int(rank)], int(code[0]) if code else 1)
        case [("agent" | "host") as what, rank, "is", "lost"]:
            agent = world.agents[int(rank)]
            agent.heard, agent.lost = False, True
            if what == "host":
                agent.alive = False
        case ["agent", rank, "is", "back"]:
            agent = world.agents[int(rank)]
            agent.heard, agent.lost = True, False
            if not agent.alive and agent.member.attempt:
                agent.exit = Exit(error="the engine ended while no agent ran")
        case ["host", rank, "is", "back"]:
            task = world.task_of(int(rank))
            assert task is not None
            world.agents[int(rank)] = _Agent(Member(task, since=world.now))
        case ["stubborn", rank]:
            world.agents[int(rank)].stubborn = True
        case ["in", "flight", count]:
            world.in_flight = int(count)
        case [("drain" | "undrain") as word]:
            assert world.task is not None
            world.task = dataclasses.replace(world.task, drain=word == "drain")
        case ["removed"]:
            world.task = None
        case ["replaced"]:
            assert world.task is not None
            world.revision += 1
            world.task = dataclasses.replace(world.task, revision=world.revision)
        case ["show"]:
            for rank, agent in sorted(world.agents.items()):
                member = agent.member
                alive = "running" if agent.alive else "not running"
                yield f"{world.now:6.1f}  rank {rank}: {member.state.value} attempt {member.attempt}, {alive}"
        case _:
            raise AssertionError(f"cannot play {line!r}")
