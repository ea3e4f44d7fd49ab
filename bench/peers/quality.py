"""Routing quality: one workload through each router in turn, the same engines behind all of them.

Runs share no KV block: every prompt of a run begins with the run's own mark. (A `cache_salt` would do the same,
but vllm-router's kv_aware routes salted requests by load alone.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stoker.bench import routing
from stoker.bench.stats import RunFigures, order, over_rounds
from stoker.bench.workloads import WORDS, Prompt
from stoker.common.errors import StokerError

_MARK_WORDS = 8
"""Shorter than a KV block: nothing of the mark is ever found in a cache."""


@dataclass(frozen=True)
class Contender:
    """Somebody who routes."""

    name: str
    url: str
    policy: str = ""
    """For the policy header; only Stoker's router reads it."""


@dataclass
class Standing:
    """One contender's runs of one workload."""

    contender: Contender
    rounds: list[RunFigures] = field(default_factory=list)
    failure: str = ""

    def figures(self) -> RunFigures | None:
        """Medians over the rounds; None where there is none."""
        return over_rounds(self.rounds) if self.rounds else None


async def measure(
    bench: routing.Bench,
    contenders: Sequence[Contender],
    workload: str,
    *,
    seed: int,
    rounds: int,
    say: routing.Say,
) -> list[Standing]:
    """Every contender's standing, in their order. In every round all are asked the same, marks apart."""
    per_word = await routing.tokens_per_word(bench)
    standings = {contender.name: Standing(contender) for contender in contenders}
    for number in range(rounds):
        prompts = routing.prompts_of(bench, workload, seed + number, per_word)
        for name in order(list(standings), number):
            standing = standings[name]
            if standing.failure:
                continue
            label = f"{workload}, {name}, round {number + 1}/{rounds}"
            marked = mark(prompts, f"{workload} {name} {seed} {number}")
            target = replace(bench, http=(standing.contender.url,), api="http", sessions=True)
            try:
                run = await routing.run_once(target, marked, standing.contender.policy, "", _under(label, say))
            except StokerError as error:
                standing.failure = error.message
                continue
            standing.rounds.append(replace(run, policy=name))
            if run.errors == run.requests:
                standing.failure = f"no request succeeded: {run.errors_by_kind}"
    return list(standings.values())


def _under(label: str, say: routing.Say) -> routing.Say:
    return lambda text: say(f"{label}: {text}")


def mark(prompts: Sequence[Prompt], label: str) -> list[Prompt]:
    """The same prompts, beginning with words that follow from `label`."""
    words = " ".join(random.Random(label).choices(WORDS, k=_MARK_WORDS))
    return [_marked(prompt, words) for prompt in prompts]


def _marked(prompt: Prompt, words: str) -> Prompt:
    if not prompt.messages:
        return replace(prompt, text=f"{words} {prompt.text}")
    (role, content), *others = prompt.messages
    return replace(prompt, messages=((role, f"{words} {content}"), *others))
