"""How the router's costs grow with replicas, with the prompt's length and with router processes.

    python bench/growth.py [-o json] [--draw docs/img] [--only replicas prompt routers]

Everything runs in one thread; p50 of one call, in microseconds of CPU. `--draw` writes one SVG for each.
What the curves mean: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.decide import NOW, PROMPTS, fleet_of, keys
from bench.svg import drawn
from stoker.bench.workloads import WORDS
from stoker.common.blocks import block_keys, pack_tokens
from stoker.local.model import TURN, TURN_END, cached
from stoker.router.core import Delta, Dispatched, Fleet, Replica, Request, Sync, Tier, decide
from stoker.router.fleet.remembered_keys import RememberedKeys
from stoker.router.prompts.tokenizer import ModelTokenizer
from tests.support.engines import TINY
from tests.support.router import tokenizer_of

BLOCK = 16
REPLICAS = (10, 100, 1_000)
TOKENS = (64, 256, 1_024, 4_096, 16_384, 32_768, 131_072)
ROUTERS = (1, 2, 4, 8)
TAIL_CHARS = 2_000
NEW_BLOCKS = 32  # of a prompt whose beginning the fleet knows

Lines = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CURVES), default=tuple(CURVES))
    parser.add_argument("--draw", type=Path, help="folder for the drawings")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    found: dict[str, Lines] = {}
    for name in options.only:
        measured, title, axis, notes = CURVES[name]
        lines = found[name] = measured()
        if options.draw:
            options.draw.mkdir(parents=True, exist_ok=True)
            picture = drawn(title, axis, "microseconds of CPU, p50", lines, notes)
            (options.draw / f"growth-{name}.svg").write_text(picture)
    if options.output == "json":
        print(json.dumps(found, indent=2))
        return
    for name, lines in found.items():
        steps = [x for x, _ in max(lines.values(), key=len)]
        print(f"{CURVES[name][2]:<44}" + "".join(f"{x:>10,}" for x in steps))
        for what, line in lines.items():
            values = dict(line)
            print(f"{what:<44}" + "".join(f"{values.get(x, float('nan')):>10,.1f}" for x in steps))
        print()


def p50(action: Callable[[int], object], rounds: int) -> float:
    """Microseconds of CPU, which other processes on the machine do not lengthen."""
    times = []
    for number in range(rounds):
        begun = thread_time()
        action(number)
        times.append(1e6 * (thread_time() - begun))
    return round(median(times), 1)


def by_replicas() -> Lines:
    lines: Lines = {}
    for count in REPLICAS:
        rng = Random(1)
        fleet, requests = fleet_of(count, rng)
        warm: list[tuple[str, float]] = [
            ("decision, 512 blocks", _deciding(fleet, requests, rng)),
            ("decision with its explanation", _deciding(fleet, requests, rng, explain=True)),
            ("100 changes of one digest", _digesting(fleet, rng)),
            ("a load report", _reporting(fleet)),
            ("a replica comes or goes, and a decision", _changing(fleet, requests, rng)),
        ]
        for name, cost in warm:
            lines.setdefault(name, []).append((count, cost))
    return lines


def _deciding(fleet: Fleet, requests: list[Request], rng: Random, *, explain: bool = False) -> float:
    return p50(lambda number: decide(requests[number % PROMPTS], fleet, NOW, rng, explain=explain), 1_000)


def _digesting(fleet: Fleet, rng: Random, rounds: int = 300) -> float:
    """Half of the changes bring a block, half take one that came before."""
    name = next(iter(fleet.replicas))
    steps = [keys(50, rng) for _ in range(rounds + 1)]

    def change(number: int) -> None:
        step = Delta(1, number + 2, {Tier.GPU: steps[number + 1]}, {Tier.GPU: steps[number] if number else ()})
        assert fleet.delta(name, step, NOW) is Sync.APPLIED

    return p50(change, rounds)


def _reporting(fleet: Fleet) -> float:
    names = cycle(fleet.replicas)
    return p50(lambda number: fleet.load.report(next(names), number, NOW), 1_000)


def _changing(fleet: Fleet, requests: list[Request], rng: Random) -> float:
    def change(number: int) -> None:
        if number % 2:
            fleet.remove("newcomer")
        else:
            fleet.put(Replica("newcomer"))
        decide(requests[number % PROMPTS], fleet, NOW, rng)

    return p50(change, 60)


def by_prompt() -> Lines:
    """Texts of words, as one message of a chat, or a plain text; over 100 replicas."""
    lines: Lines = {}
    tokenizer = tokenizer_of(cached(TINY))[1]
    for count in TOKENS:
        rng = Random(1)
        rounds = max(5, min(300, 2_000_000 // count))
        fleet, requests = fleet_of(100, rng, count // BLOCK, common=min(8, count // BLOCK))
        ids = array("I", [rng.randrange(150_000) for _ in range(count)])
        costs: Iterable[tuple[str, float]] = (
            ("tokenize, never seen", _tokenizing(tokenizer, count, rng, min(rounds, 20))),
            ("tokenize, seen but for 2 KB at its end", _tokenizing_tails(tokenizer, count, rng, min(rounds, 20))),
            ("tokenize, seen before", _tokenizing_again(tokenizer, count, rng, rounds)),
            ("hash, never seen", p50(lambda _, ids=ids: block_keys(ids, BLOCK, 0), rounds)),  # type: ignore[misc]
            ("hash, seen before", _hashing_again(ids, rounds)),
            ("decide, 100 replicas", _deciding(fleet, requests, rng)),
        )
        for name, cost in costs:
            lines.setdefault(name, []).append((count, cost))
    return lines


def _text(tokenizer: ModelTokenizer, count: int, rng: Random) -> str:
    """A message of about so many tokens, between the special tokens that a chat template puts around it."""
    sample = " ".join(rng.choices(WORDS, k=500))
    words = round(count * 500 / len(tokenizer.encode(sample, add_special_tokens=False)))
    return f"{TURN}user\n{' '.join(rng.choices(WORDS, k=max(1, words)))}{TURN_END}\n"


def _tokenizing(tokenizer: ModelTokenizer, count: int, rng: Random, rounds: int) -> float:
    texts = [_text(tokenizer, count, rng) for _ in range(rounds)]
    return p50(lambda number: tokenizer.encode(texts[number], add_special_tokens=False), rounds)


def _tokenizing_tails(tokenizer: ModelTokenizer, count: int, rng: Random, rounds: int) -> float:
    """One long text without a special token within, each time with another end."""
    begin = _text(tokenizer, count, rng).removesuffix(f"{TURN_END}\n")
    tails = [f" {' '.join(rng.choices(WORDS, k=TAIL_CHARS))}"[:TAIL_CHARS] for _ in range(rounds)]
    tokenizer.encode(begin, add_special_tokens=False)
    return p50(lambda number: tokenizer.encode(begin + tails[number], add_special_tokens=False), rounds)


def _tokenizing_again(tokenizer: ModelTokenizer, count: int, rng: Random, rounds: int) -> float:
    text = _text(tokenizer, count, rng)
    tokenizer.encode(text, add_special_tokens=False)
    return p50(lambda _: tokenizer.encode(text, add_special_tokens=False), rounds)


def _hashing_again(ids: array[int], rounds: int) -> float:
    remembered = RememberedKeys()
    remembered.of(pack_tokens(ids), BLOCK, 0)
    return p50(lambda _: remembered.of(pack_tokens(ids), BLOCK, 0), rounds)


def by_routers() -> Lines:
    """What a request costs all router processes together: one decides and sends, the others hear of it."""
    lines: Lines = {}
    rng = Random(1)
    fleet, requests = fleet_of(100, rng)
    fresh = [replace(request, keys=[*request.keys[:-NEW_BLOCKS], *keys(NEW_BLOCKS, rng)]) for request in requests]

    def send(number: int) -> None:
        request = fresh[number % PROMPTS]
        decision = decide(request, fleet, NOW, rng)
        fleet.release(fleet.dispatch(request, decision, NOW), NOW)

    def hear(number: int) -> None:
        fleet.overhear(Dispatched("replica-0001", fresh[number % PROMPTS].keys[-NEW_BLOCKS:], 512, 8_192), NOW, NOW)

    sending, hearing = p50(send, 1_000), p50(hear, 1_000)
    for count in ROUTERS:
        told = (count - 1) * hearing
        for name, cost in (
            ("all processes together, for a request", sending + told),
            ("each process, for its part of the load", (sending + told) / count),
            ("hearing of what others sent", told / count),
        ):
            if cost:
                lines.setdefault(name, []).append((count, round(cost, 1)))
    return lines


CURVES: dict[str, tuple[Callable[[], Lines], str, str, dict[str, float]]] = {
    "replicas": (by_replicas, "One core's time, by the size of the fleet", "replicas", {"1 ms": 1_000.0}),
    "prompt": (by_prompt, "One core's time for a prompt", "tokens of the prompt", {"1 ms": 1_000.0}),
    "routers": (by_routers, "One request, by the number of routers", "router processes", {}),
}


if __name__ == "__main__":
    main()
