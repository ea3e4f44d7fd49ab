"""The routing workloads as seeded text: the same seed gives the same prompts on every machine.

    shared   long prefixes, many short tails: documents or tool prompts that many users ask about
    chat     conversations of several turns under a few system prompts
    agentic  many short turns under one of a few long tool prompts
    unique   nothing in common: what affinity must not slow down

Sizes are wanted in tokens, prompts are made of words: `tokens_per_word` is what the caller measured with
the model's own tokenizer on `sample()`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

_TEXT = (
    "able about above accept access account action active add address after again all also always and "
    "answer any apply argument around array ask base before begin being below best better between block "
    "body both break bring build bytes call case change check child class clear close code collect "
    "column come common compare complete connect consider contain content context continue control "
    "convert copy correct count cover create current data date day decide deep default define delete "
    "depend describe design detail different digit direct document done double down each early easy edit "
    "either element else empty enable encode end enter equal error escape even event every exact example "
    "except expect explain extra fact fail false field file fill filter final find first fixed flag "
    "float follow force form format found from full function future general get give given global good "
    "group handle hard have head help here high hold hour how image import include index inside instance "
    "integer into item join just keep key kind know label large last late later lead learn leave left "
    "length less level library like limit line link list little local lock long look loop low main make "
    "many map mark match mean member memory message method middle might minute mode module more most "
    "move much must name near need never new next node none normal note nothing number object of off "
    "offset often old once only open option or order other out output over own pack page pair parent "
    "part pass path pattern people pick piece place plain point possible prefix present print process "
    "produce program protocol provide public put question queue quick quite quote raise range rather raw "
    "read ready real reason record reference regular remove repeat reply report request require reset "
    "result return right root row rule run same save say scan search second see select send separate "
    "sequence server set shape share short should show side signal simple since single size small some "
    "sort source space special split stack standard start state step still stop store stream string "
    "strip strong such support symbol system table tag take target task test text than that the then "
    "there thing think this thread through time to today together token top total trace tree true try "
    "turn two type under union unit until update upper use user valid value variable very view wait walk "
    "want way week well what when where which while white whole why wide width will window with word "
    "work world would write wrong year yes yet zero"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload: `text` for a completion, or `messages` (role, content) for a chat.

    `after` is the position of the request whose end must come first, or −1. `group` names what it shares
    its prefix with, `tenant` who asks, where that is told.
    """

    max_tokens: int
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    after: int = -1
    group: str = ""
    tenant: str = ""


def sample(seed: int = 0, words: int = 2_000) -> str:
    """Return text like that of all workloads, to measure a tokenizer's tokens per word on."""
    return _words(Random(seed), words)  # noqa: S311 (repeatable on purpose)


def shared(
    seed: int,
    *,
    requests: int = 150,
    prefixes: int = 24,
    prefix_tokens: int = 2_700,
    tail_tokens: int = 180,
    zipf: float = 0.8,
    max_tokens: int = 8,
    common_tokens: int = 0,
    tokens_per_word: float = 1.0,
) -> list[Prompt]:
    """Prompts of a shared prefix and a tail of their own; prefix popularity falls as rank^−zipf.

    `common_tokens` of each prefix are the same in all of them: one long system prompt.
    """
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    common = _words(rng, round(common_tokens / tokens_per_word))
    length = round((prefix_tokens - common_tokens) / tokens_per_word)
    bodies = [_join(common, _words(rng, length)) for _ in range(prefixes)]
    rng.shuffle(bodies)
    popularity = list(accumulate((rank + 1) ** -zipf for rank in range(prefixes)))
    prompts = []
    for _ in range(requests):
        chosen = min(bisect(popularity, rng.random() * popularity[-1]), prefixes - 1)
        tail = _words(rng, round(tail_tokens / tokens_per_word))
        prompts.append(Prompt(max_tokens, _join(bodies[chosen], tail), group=f"prefix-{chosen}"))
    return prompts


def chat(
    seed: int,
    *,
    conversations: int = 25,
    turns: int = 6,
    systems: int = 4,
    system_tokens: int = 700,
    turn_tokens: int = 340,
    max_tokens: int = 8,
    tokens_per_word: float = 1.0,
) -> list[Prompt]:
    """Conversations whose turns interleave at random; each turn sends all that came before it.

    A reply in the history is the workload's own words, so that prompts do not depend on the engine.
    """
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    system = [_words(rng, round(system_tokens / tokens_per_word)) for _ in range(systems)]
    history: list[tuple[tuple[str, str], ...]] = [
        (("system", system[number % systems]),) for number in range(conversations)
    ]
    last = [-1] * conversations
    order = _interleave(rng, conversations, turns)
    prompts = []
    for conversation in order:
        said = ("user", _words(rng, round(turn_tokens / tokens_per_word)))
        history[conversation] = (*history[conversation], said)
        prompts.append(
            Prompt(
                max_tokens,
                messages=history[conversation],
                after=last[conversation],
                group=f"conversation-{conversation}",
            )
        )
        history[conversation] = (*history[conversation], ("assistant", _words(rng, max_tokens)))
        last[conversation] = len(prompts) - 1
    return prompts


def agentic(
    seed: int,
    *,
    sessions: int = 24,
    turns: int = 10,
    tool_sets: int = 4,
    tool_tokens: int = 2_400,
    turn_tokens: int = 60,
    max_tokens: int = 8,
    tokens_per_word: float = 1.0,
) -> list[Prompt]:
    """Agents that call tools: a long prompt of tool definitions, shared, then many short turns.

    A chat of other proportions: nearly all of a request is what its session, or another, sent before.
    """
    return chat(
        seed,
        conversations=sessions,
        turns=turns,
        systems=tool_sets,
        system_tokens=tool_tokens,
        turn_tokens=turn_tokens,
        max_tokens=max_tokens,
        tokens_per_word=tokens_per_word,
    )


def unique(
    seed: int,
    *,
    requests: int = 100,
    prompt_tokens: int = 1_500,
    max_tokens: int = 8,
    tokens_per_word: float = 1.0,
) -> list[Prompt]:
    """Prompts with nothing in common."""
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    words = round(prompt_tokens / tokens_per_word)
    return [Prompt(max_tokens, _words(rng, words), group=f"unique-{i}") for i in range(requests)]


TENANTS = ("half", "third-quarter", "last-quarter")


def by_tenants(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, asked by three tenants.

    The first half of a workload's prefixes or conversations, in `shared` the popular ones, is the first tenant's,
    and a quarter each the others'.
    """
    groups = [int(prompt.group.rpartition("-")[2]) for prompt in prompts]
    size = max(groups, default=0) + 1
    return [
        replace(prompt, tenant=TENANTS[max(0, 4 * group // size - 1)])
        for prompt, group in zip(prompts, groups, strict=True)
    ]


WORKLOADS: dict[str, Callable[..., list[Prompt]]] = {
    "shared": shared,
    "chat": chat,
    "agentic": agentic,
    "unique": unique,
}


def _interleave(rng: Random, conversations: int, turns: int) -> list[int]:
    """Every conversation's turns in rounds: each round is a shuffle, so nobody waits long for its next turn."""
    order: list[int] = []
    for _ in range(turns):
        lap = list(range(conversations))
        rng.shuffle(lap)
        order += lap
    return order


def _words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
