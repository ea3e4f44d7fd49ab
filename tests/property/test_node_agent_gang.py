"""Whatever happens to its engines, agents and hosts, a gang never runs two attempts as one, and always recovers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.node_agent.core.gang import State
from tests.support.gang_world import World, play


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[str]]:
    size = draw(st.integers(1, 4))
    rank = st.integers(0, size - 1)
    line = st.one_of(
        st.builds("t {}".format, st.sampled_from([0.1, 0.3, 1, 5, 25])),
        st.builds("engine {} dies".format, rank),
        st.builds("agent {} is lost".format, rank),
        st.builds("agent {} is back".format, rank),
        st.builds("host {} is lost".format, rank),
        st.builds("host {} is back".format, rank),
        st.sampled_from(
            ["serves", "silent", "says dead", "drain", "undrain", "replaced", "in flight 0", "in flight 1"]
        ),
    )
    return size, draw(st.lists(line, max_size=15))


def _happens(world: World, line: str) -> None:
    """A line of the story, unless it makes no sense now."""
    words = line.split()
    if words[0] in {"engine", "agent", "host"}:
        agent = world.agents[int(words[1])]
        if words[0] == "engine" and not agent.alive:
            return
        if words[-1] == "back" and not agent.lost:
            return
        if words[0] == "host" and words[-1] == "back" and agent.alive:
            return  # it was the agent that was lost, not the host
    list(play(world, line))


def _check(world: World) -> None:
    heard = {rank: agent for rank, agent in world.agents.items() if agent.heard}
    head = heard.get(0)
    for rank, agent in heard.items():
        member = agent.member
        if member.state is State.READY:
            assert agent.alive or agent.exit is not None, f"rank {rank} is ready without an engine"
        if (
            rank
            and head is not None
            and head.member.attempt  # a host that came back without memory begins at 0
            and member.state is State.STARTING
            and member.task.revision == head.member.task.revision
        ):
            assert member.attempt <= head.member.attempt, f"rank {rank} is ahead of its leader"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(stories())
def test_a_gang_stays_one_and_recovers(story: tuple[int, list[str]]) -> None:
    size, lines = story
    world = World()
    for line in (f"gang {size}", "deployed", "serves"):
        list(play(world, line))
    for line in lines:
        _happens(world, line)
        _check(world)
    # Peace: everything is back, nothing is asked but to run.
    for rank, agent in list(world.agents.items()):
        if agent.lost:
            _happens(world, f"agent {rank} is back" if agent.alive else f"host {rank} is back")
    for line in ("serves", "undrain", "in flight 0", "t 100"):
        list(play(world, line))
        _check(world)
    states = {rank: (agent.member.state, agent.member.attempt) for rank, agent in world.agents.items()}
    assert {state for state, _ in states.values()} == {State.READY}, states
    assert len({attempt for _, attempt in states.values()}) == 1, states
