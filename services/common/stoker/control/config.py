"""What an operator can set for the loop of a deciding service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class LoopConfig:
    """How a deciding service leads, looks and acts."""

    candidate: Annotated[
        str, Meta(description="name under which this process stands for election; empty for host, pid and a number")
    ] = ""
    leader_ttl_s: Annotated[
        float, Meta(description="a leader that is silent so long is deposed, seconds", ge=1, le=60)
    ] = 5.0
    tick_s: Annotated[float, Meta(description="longest time between two rounds, seconds", ge=0.05)] = 1.0
    debounce_s: Annotated[float, Meta(description="time to gather changes before a round, seconds", ge=0, le=5)] = (
        0.05
    )
    stale_after_s: Annotated[
        float, Meta(description="age at which the view of the fleet is too old to decide on, seconds", ge=1)
    ] = 10.0
    write_timeout_s: Annotated[float, Meta(description="deadline of one write, seconds", gt=0)] = 5.0
