"""Units that must not mix. A figure in another unit than these carries it in its name."""

from __future__ import annotations

from typing import NewType

Watts = NewType("Watts", int)
"""Electric power. Whole watts: sums over a facility are exact, and a solver takes them as they are."""

Bytes = NewType("Bytes", int)
"""Memory. A GB is 10⁹ of them, a GiB 2³⁰."""

BytesPerSecond = NewType("BytesPerSecond", int)
"""Traffic and bandwidth. A link of 400 Gbit/s carries 5·10¹⁰ in each direction."""

NO_POWER, NO_RATE = Watts(0), BytesPerSecond(0)


def watts(kilowatts: float) -> Watts:
    """From kW, rounded to whole watts."""
    return Watts(round(kilowatts * 1_000))


def link_rate(gigabits_per_second: float) -> BytesPerSecond:
    """From Gbit/s, as links are sold."""
    return BytesPerSecond(round(gigabits_per_second * 1e9 / 8))
