"""What is asked of a model, and how it must be answered."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What the replicas of a pool do."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as they come. `_scv` are squared coefficients of variation: variance over squared mean; of the time
    between arrivals 1 is Poisson's. `hit_rate` is the share of prompt tokens that is found in a cache."""

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    prompt_scv: float = 0.25
    output_scv: float = 0.25
    arrival_scv: float = 1.0
    hit_rate: float = 0.0

    @property
    def context(self) -> float:
        """Tokens of a sequence that decodes, on average over time: long answers are there for longer."""
        return self.prompt_tokens + self.output_tokens * (1.0 + self.output_scv) / 2.0

    @property
    def length(self) -> int:
        """Tokens that a sequence that decodes will have at its end, on average over time."""
        return max(1, round(self.prompt_tokens + self.output_tokens * (1.0 + self.output_scv)))

    @property
    def tokens_per_s(self) -> float:
        """Generated."""
        return self.requests_per_s * self.output_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """A share `attainment` of the requests gets its first token within `ttft_s`, and the others within `itl_s` each
    on average; None: however long it takes."""

    ttft_s: float = 1.0
    itl_s: float | None = 0.05
    attainment: float = 0.95

    @property
    def may_miss(self) -> float:
        """Share of the requests that may miss either."""
        return 1.0 - self.attainment
