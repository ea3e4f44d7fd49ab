"""Each file under tests/scenarios/scaler is a timeline with the decisions it must lead to."""

from functools import partial
from pathlib import Path

import pytest

from tests.support import scenario
from tests.support.scaler_world import World, play

FILES = sorted((Path(__file__).parent / "scaler").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    scenario.run(path, partial(play, World()))


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 15
