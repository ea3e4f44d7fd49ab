"""Counts by one who knows every arrival beforehand: what no policy that has to wait and see can do much better than.

The load of each second is what the requests that come in it keep busy, in replicas; averaged over `window_s` around
it and with `spare` square roots of it on top (square-root staffing: what chance takes on top of a load grows so). A
replica is ordered one start before it is needed, and kept where it would be needed again within one start: starting
another costs as much. It is a family of plans, not a proof: another plan may still take somewhat less.

Source of the square root: W. Whitt, "Understanding the Efficiency of Multi-Server Service Systems", Management
Science 38(5), 1992.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.bench.replicas import Hardware, Job

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Load:
    """Replicas that the requests of each second keep busy."""

    each: Seconds

    @classmethod
    def of(cls, jobs: Iterable[Job], hardware: Hardware, hit_rate: float) -> Load:
        """Of known requests; `hit_rate` of their prompts' tokens are found in caches."""
        busy: dict[int, float] = {}
        for job in jobs:
            prefill_s = job.prompt_tokens * (1.0 - hit_rate) / hardware.prefill_rate
            busy[int(job.at)] = busy.get(int(job.at), 0.0) + prefill_s + job.output_tokens * hardware.sequence_s
        each = np.zeros(max(busy, default=0) + 1)
        each[list(busy)] = list(busy.values())
        return cls(each)

    def plan(self, window_s: float, spare: float, startup_s: float) -> Plan:
        """The counts that this much on top takes."""
        around = np.ones(max(1, round(window_s)))
        covered = np.convolve(np.ones(len(self.each)), around, "same")
        level = np.convolve(self.each, around, "same") / covered
        needed = np.ceil(level + spare * np.sqrt(level)).astype(int)
        ahead = max(1, math.ceil(startup_s) + 1)
        reaching = np.lib.stride_tricks.sliding_window_view(np.pad(needed, (0, ahead - 1)), ahead)
        return Plan(reaching.max(axis=1))


@dataclass(frozen=True, eq=False)
class Plan:
    """How many replicas there shall be at each second; at the end as many as in the last."""

    counts: NDArray[np.int64]

    def at(self, seconds: float) -> int:
        """The count to be ordered at a moment."""
        return int(self.counts[min(int(seconds), len(self.counts) - 1)])
