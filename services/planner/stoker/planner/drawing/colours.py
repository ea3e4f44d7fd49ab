"""Colours: one hue for each deployment, three shades of it for replicas that lie side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stoker.planner.core.ordering import natural

HUES = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#6a4c93"),
    *("#a3b018", "#b0124f", "#7d5a3c", "#2aa3a3", "#4f5d75", "#e05780"),
)
"""Told apart by all as far as there are so many: the first five are Okabe and Ito's."""

FREE, NODE, HOST, EDGE, INK, FAINT = "#ffffff", "#eef0f2", "#dfe3e6", "#8a9299", "#222222", "#6b7278"
NORMAL, AFTER, OVER, TRACK = "#4a5560", "#b9c2ca", "#c62828", "#f7f8f9"
NARROW = "#c75000"
"""Of links that carry less than what hangs below them."""

_SHADES = (0.0, 0.4, -0.22)


class Palette:
    """The colours of replicas, given by their deployments."""

    def __init__(self, replicas: Mapping[str, str]) -> None:
        by_deployment: dict[str, list[str]] = defaultdict(list)
        for replica in sorted(replicas, key=natural):
            by_deployment[replicas[replica]].append(replica)
        self.deployments = {
            name: HUES[number % len(HUES)] for number, name in enumerate(sorted(by_deployment, key=natural))
        }
        self.counts = {name: len(mine) for name, mine in by_deployment.items()}
        self._replicas = {
            replica: shaded(self.deployments[name], _SHADES[number % len(_SHADES)])
            for name, mine in by_deployment.items()
            for number, replica in enumerate(mine)
        }

    @property
    def repeats(self) -> bool:
        """Whether two deployments have one colour."""
        return len(self.deployments) > len(HUES)

    def of(self, replica: str) -> str:
        """A replica's colour."""
        return self._replicas[replica]


def shaded(colour: str, by: float) -> str:
    """A colour nearer to white (`by` above 0, up to 1) or to black (below 0)."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    mixed = (part + (255 - part) * by if by > 0 else part * (1 + by) for part in parts)
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def on(colour: str) -> str:
    """What is legible on a colour: white or near black."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK
