"""Models and machines for tests of sizing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stoker.planner.catalogue import load
from stoker.planner.core.sizing.architecture import Model
from stoker.planner.core.sizing.machine import Machine
from stoker.planner.machines import machine_of
from stoker.planner.model_config import read

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


@cache
def model(name: str) -> Model:
    """One of the examples."""
    return read(MODELS / f"{name}.json")


@cache
def machine(gpu: str) -> Machine:
    """The usual host of a GPU type."""
    return machine_of(load(), gpu)
