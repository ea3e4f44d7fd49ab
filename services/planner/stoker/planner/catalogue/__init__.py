"""GPU, node and rack types as their makers publish them, with source and date of each figure."""

from __future__ import annotations

from stoker.planner.core.facility.values import Facility


def load() -> Facility:
    """A facility with nothing but the catalogue's types: `gpu_types`, `node_types` and `rack_types`."""
    raise NotImplementedError
