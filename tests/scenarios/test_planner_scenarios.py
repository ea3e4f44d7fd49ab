"""Each file under tests/scenarios/planner is a story with the plans it must lead to; every plan is checked too."""

from functools import partial
from pathlib import Path

import pytest

from tests.support import scenario
from tests.support.planner_world import World, play

FILES = sorted((Path(__file__).parent / "planner").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    scenario.run(path, partial(play, World()))


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 8
