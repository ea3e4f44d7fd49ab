"""How long a step of the simulated engine takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """A step's cost: a fixed part, a part a token of prefill, a part a decoding sequence, and attention.

    The defaults are fitted to vLLM 0.32 serving Stoker's tiny model on one CPU thread (docs/engines.md).
    """

    step_s: float = 0.0045
    """Any step at all: scheduling, sampling, reading the weights once."""
    prefill_token_s: float = 1 / 1400
    decode_sequence_s: float = 0.0017
    context_token_s: float = 1.6e-7
    """For each token computed and each token before it that it attends to."""
    speed: float = 1.0
    """Divides all of the above."""

    def step_seconds(self, prefill_tokens: int, decoding: int, attended: int) -> float:
        """Seconds for one step; `attended` sums, over the tokens computed, the tokens each looks back at."""
        busy = (
            self.step_s
            + prefill_tokens * self.prefill_token_s
            + decoding * self.decode_sequence_s
            + attended * self.context_token_s
        )
        return busy / self.speed
