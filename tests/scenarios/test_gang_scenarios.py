"""Each file under tests/scenarios/gang is a timeline of engines and agents with what must be done about it."""

from functools import partial
from pathlib import Path

import pytest

from tests.support import scenario
from tests.support.gang_world import World, play

FILES = sorted((Path(__file__).parent / "gang").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    scenario.run(path, partial(play, World()))


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 10
