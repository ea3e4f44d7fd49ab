"""Scaling policies side by side: replica-hours at equal or better attainment of the SLO, and thrashing.

    python bench/scaling.py --data PATH [-o json] [--only azure mooncake step …] [--startup 30 90] [--load 1 10]
    python bench/scaling.py --data PATH --alone [--seed 1 2 3]
    python bench/scaling.py --data PATH --startups

`PATH` holds azure_llm_2023_code.csv and mooncake_synthetic_trace.jsonl. Ours run at their defaults. What they are
held to is Knative's policy (`concurrency`, with its own pace) tuned on the very load that it is shown with: stable
window, scale-down delay and panic threshold one after the other, each with the largest target whose attainment is no
lower than ours, and of all these the one with the fewest replica-hours. The smallest fixed count that attains as much
is shown for reference: nobody knows it beforehand. So are the hours of one who knows every arrival beforehand
(`stoker.simulate.clairvoyant`, the best of a family of plans): no policy that has to wait and see comes below them,
and `possible_%` is what they are below the baseline.

With `--alone` only ours are simulated, under each of the seeds: the lower median of each figure by itself. A seed
makes the requests of the made loads, and only the order of equals where a trace is replayed.

`--known FILE` keeps what was simulated, by all that it follows from: the requests, the settings, the policy, and the
text of the programs that had a part in it. Another run takes it from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median_low

from stoker.bench.published import azure, mooncake
from stoker.bench.replicas import Job
from stoker.router.core import RoutingConfig
from stoker.scaler.core.policy import Policy
from stoker.simulate import clairvoyant, loads
from stoker.simulate.figures import Figures, replica_seconds
from stoker.simulate.ledger import Ledger
from stoker.simulate.policies import Contender, parsed
from stoker.simulate.run import simulate
from stoker.simulate.settings import Objective, Settings, Starting
from stoker.simulate.traffic import Scale, scaled

OURS = ("slo", "forecast")
# Knative's pace: any number up at once, down to no less than half at once, no cooldown, no margin.
PACE = "pace.up_factor=1000,pace.down_cooldown_s=0,pace.margin=0,utilisation=1"
TARGETS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)
WINDOWS = ("stable_s=60,panic_s=6", "stable_s=300,panic_s=30")
PANICS = ("panic_at=2", "panic_at=10")  # Knative's default, and its most: hardly ever
DELAYS = ("pace.settle_s=300", "pace.settle_s=900", "pace.settle_s=0")
KNOWING = (5.0, 10.0, 20.0, 40.0)  # windows of the clairvoyant's plans, and what is on top of the load
SPARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
TIMES_OURS = 2.0  # what costs more than so many times as much as ours is not looked at further
ROUTING = RoutingConfig(hold_s=1.0)  # prompts take a third of a second here: a replica is given its next one in time


@dataclass(frozen=True)
class Load:
    """A load and how it is served."""

    name: str
    jobs: tuple[Job, ...]
    settings: Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the two traces")
    parser.add_argument("--only", nargs="+", help="some of the loads")
    parser.add_argument("--ours", nargs="+", default=list(OURS), help="policies to show beside the baseline")
    parser.add_argument("--startup", type=float, nargs="+", default=[30.0], help="seconds until a replica serves")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0], help="so many times as many requests")
    parser.add_argument("--known", type=Path, help="file that keeps what was simulated")
    parser.add_argument("--startups", action="store_true", help="attainment of a step under several start-up times")
    parser.add_argument("--alone", action="store_true", help="ours without the baseline, at the median of the seeds")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="without --alone the first one counts")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.startups:
        rows = startups(options.ours, options.seed[0])
    else:
        names = options.only or [*SOURCES, *SHAPES]
        known = Known.read(options.known)
        rows = []
        for name, startup_s, times in product(names, options.startup, options.load):
            each_seed = [made(name, options.data, startup_s, seed, times) for seed in options.seed]
            found = (
                alone(each_seed, options.ours, known)
                if options.alone
                else compared(each_seed[0], options.ours, known)
            )
            rows += [{"startup_s": startup_s, "load_x": times, **each} for each in found]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("  ".join(f"{name:>{width(name)}}" for name in rows[0]))
    for each in rows:
        print("  ".join(f"{'–' if value is None else value!s:>{width(name)}}" for name, value in each.items()))


def width(name: str) -> int:
    return {"load": 10, "policy": 58}.get(name, max(8, len(name)))


SOURCES: dict[str, tuple[str, Callable[[Path], Iterator[Job]], Scale, Objective, int]] = {
    "azure": ("azure_llm_2023_code.csv", azure, Scale(), Objective(), 3),
    # Its prompts are up to 191,000 tokens long: with less, many could be in time on no replica.
    "mooncake": ("mooncake_synthetic_trace.jsonl", mooncake, Scale(), Objective(ttft_s=8.0), 6),
}
# Short enough to be simulated some hundred times, long enough to start and to stop what they need.
SHAPES: dict[str, tuple[Callable[[int], Iterator[Job]], int]] = {
    "step": (partial(loads.step, low=4.0, seconds=1_200.0), 3),
    "ramp": (partial(loads.ramp, low=2.0, high=10.0, seconds=1_200.0), 2),
    "burst": (partial(loads.burst, low=2.0, high=8.0, seconds=1_800.0), 3),
    "diurnal": (partial(loads.diurnal, low=0.5, high=6.0, day_s=1_200.0, seconds=2_400.0), 2),
    "flapping": (partial(loads.flapping, low=2.0, high=6.0, seconds=1_200.0), 3),
}


def made(name: str, data: Path, startup_s: float, seed: int, times: float = 1.0) -> Load:
    """A load so many times as heavy; as many times as many replicas serve at its beginning and at most."""
    most = round(24 * times)
    settings = Settings(starting=Starting(startup_s), most=most, routing=ROUTING, seed=seed)
    if name in SHAPES:
        shape, initial = SHAPES[name]
        source, scale = partial(shape, seed), Scale()
    else:
        file, read, scale, objective, initial = SOURCES[name]
        source, settings = partial(read, data / file), replace(settings, objective=objective)
    jobs = scaled(source, replace(scale, load=scale.load * times), seed)()
    return Load(name, tuple(jobs), replace(settings, initial=max(1, round(initial * times))))


@dataclass
class Known:
    """Figures of simulations that were done before, in a file of theirs; without one nothing is kept."""

    path: Path | None = None
    figures: dict[str, dict[str, object]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> Known:
        return cls(path, json.loads(path.read_text()) if path and path.exists() else {})

    def key(self, load: Load, policy: str) -> str:
        """What a simulation follows from, in one number."""
        ours = policy.split(":")[0] in OURS
        parts = (_text_of(ours=ours), repr(load.settings), policy, *map(repr, load.jobs))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def get(self, key: str) -> Figures | None:
        found = self.figures.get(key)
        return None if found is None else Figures(**found)  # type: ignore[arg-type]

    def put(self, key: str, figures: Figures) -> None:
        self.figures[key] = asdict(figures)
        if self.path is not None:
            self.path.write_text(json.dumps(self.figures))


OUR_OWN = {"forecast.py", "forecasting.py", "model.py", "queueing.py", "reserve.py", "slo.py"}


@cache
def _text_of(*, ours: bool) -> str:
    """The programs that a simulation follows from; what only our policies run is left out for others."""
    services = Path(__file__).parents[1] / "services"
    rooms = (
        "common/stoker/bench",
        "common/stoker/simulate",
        "router/stoker/router/core",
        "scaler/stoker/scaler/core",
    )
    files = sorted(file for room in rooms for file in (services / room).rglob("*.py"))
    return "".join(file.read_text() for file in files if ours or file.name not in OUR_OWN)


class Late(Exception):
    """Too many requests were late for the attainment that is wanted."""


class Dear(Exception):
    """More replica-hours have gone by than another setting takes for all."""


@dataclass
class Trials:
    """Simulations of one load, each done once. What cannot attain `wanted`, or not cheaply enough, is cut short: the
    requests that were late stay late, and hours only grow."""

    load: Load
    known: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self._known: dict[str, Figures] = {}
        self._plans: dict[str, Contender] = {}
        self._worse: dict[str, float] = {}  # attainment that a policy was seen not to reach

    def full(self, policy: str) -> Figures:
        """All figures, however bad."""
        return self._run(policy, lambda ledger: None)

    def attaining(self, policy: str, wanted: float, hours: float = float("inf")) -> Figures:
        """The figures where as much is attained in no more than so many hours. Raises Late, Dear."""
        if policy not in self._known and self._worse.get(policy, 2.0) <= wanted:
            raise Late
        most = (1.0 - wanted) * len(self.load.jobs)

        def watch(ledger: Ledger) -> None:
            late = ledger.answered - ledger.within + ledger.refused_count
            if late > most + 1e-6:
                self._worse[policy] = min(wanted, self._worse.get(policy, 2.0))
                raise Late
            if replica_seconds(ledger.fleet.counts, ledger.clock.now) > 3_600.0 * hours:
                raise Dear

        found = self._run(policy, watch)
        if (found.attainment or 0.0) < wanted:
            raise Late
        return found

    def planned(self, window_s: float, spare: float, hit_rate: float) -> str:
        """The name of a clairvoyant's plan."""
        name = f"clairvoyant:{window_s:g} s,{spare:g},{hit_rate:g}"
        if name not in self._plans:
            settings = self.load.settings
            busy = clairvoyant.Load.of(self.load.jobs, settings.hardware, hit_rate)
            plan = busy.plan(window_s, spare, settings.starting.median_s)
            self._plans[name] = Contender(name, Policy(), plan=plan)
        return name

    def _run(self, policy: str, watch: Callable[[Ledger], None]) -> Figures:
        if policy not in self._known:
            load = self.load
            key = self.known.key(load, policy)
            kept = self.known.get(key)
            if kept is None:
                contender = self._plans.get(policy) or parsed(policy, load.settings.objective)
                kept = simulate(lambda: iter(load.jobs), contender, load.settings, said=watch).figures
                self.known.put(key, kept)
            found = self._known[policy] = kept
            print(
                f"{load.name}: {found.attainment} {found.replica_hours} {policy.replace(PACE, '')}", file=sys.stderr
            )
        return self._known[policy]


def compared(load: Load, ours: Sequence[str], known: Known | None = None) -> Iterator[dict[str, object]]:
    """Our policies, each with the best that the baseline and fixed counts do at its attainment."""
    trials = Trials(load, known or Known())
    for policy in ours:
        figures = trials.full(policy)
        best = tuned(trials, figures.attainment or 0.0, TIMES_OURS * figures.replica_hours)
        knowing = foreseen(trials, figures)
        yield row(load, figures, best, knowing)
        for other in (best, smallest(trials, figures.attainment or 0.0)):
            if other is not None:
                yield row(load, other, None)


def alone(seeds: Sequence[Load], ours: Sequence[str], known: Known | None = None) -> Iterator[dict[str, object]]:
    """Our policies, each at the median of a load's seeds."""
    trials = [Trials(load, known or Known()) for load in seeds]
    for policy in ours:
        found = [row(each.load, each.full(policy), None) for each in trials]
        yield {name: _median([figures[name] for figures in found]) for name in found[0]}


def _median(values: Sequence[object]) -> object:
    """The lower one of an even number; of what is no number, the first."""
    known = [value for value in values if isinstance(value, float | int)]
    return median_low(known) if len(known) == len(values) else values[0]


def tuned(trials: Trials, wanted: float, hours: float) -> Figures | None:
    """The cheapest setting of the baseline that attains as much; None where none does within so many hours.

    One thing after the other: window, panic and delay are each chosen with the best of what was chosen before, the
    target anew each time: the largest that attains it, as the higher it is, the fewer replicas there are.
    """
    best: Figures | None = None
    chosen = [WINDOWS[0], PANICS[0], DELAYS[0]]
    for place, values in ((0, WINDOWS), (2, DELAYS), (1, PANICS)):
        for value in values:
            tried = [*chosen[:place], value, *chosen[place + 1 :]]
            found = _largest(trials, ",".join([*tried, PACE]), wanted, best.replica_hours if best else hours)
            if found is not None:
                best, chosen = found, tried
    return best


def _largest(trials: Trials, setting: str, wanted: float, hours: float) -> Figures | None:
    """With the largest target that attains as much; None where that takes more hours."""
    best = None
    low, high = -1, len(TARGETS)  # the first is taken to attain it, the second not to
    while high - low > 1:
        middle = (low + high) // 2
        try:
            best = trials.attaining(f"concurrency:target={TARGETS[middle]:g},{setting}", wanted, hours)
            low, hours = middle, best.replica_hours
        except Dear:
            low = middle
        except Late:
            high = middle
    return best


def smallest(trials: Trials, wanted: float) -> Figures | None:
    """The smallest fixed count that attains as much."""
    low, high = 0, trials.load.settings.most + 1
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        try:
            best, high = trials.attaining(f"fixed:{middle}", wanted), middle
        except Late:
            low = middle
    return best


def foreseen(trials: Trials, ours: Figures) -> Figures | None:
    """The cheapest plan of one who knows all arrivals that attains as much as ours; None where none does."""
    best: Figures | None = None
    for window_s in KNOWING:
        low, high = -1, len(SPARES)  # the first is taken not to attain it, the last to
        while high - low > 1:
            middle = (low + high) // 2
            name = trials.planned(window_s, SPARES[middle], ours.hit_rate or 0.0)
            try:
                found = trials.attaining(name, ours.attainment or 0.0, best.replica_hours if best else float("inf"))
            except Late:
                low = middle
            except Dear:
                high = middle
            else:
                best, high = found, middle
    return best


def row(load: Load, figures: Figures, against: Figures | None, knowing: Figures | None = None) -> dict[str, object]:
    return {
        "load": load.name,
        "policy": figures.policy.replace(f",{PACE}", ""),
        "within_slo": figures.attainment,
        "replica_hours": figures.replica_hours,
        "saved_%": _saved(figures, against),
        "clairvoyant_hours": knowing and knowing.replica_hours,
        "possible_%": _saved(knowing, against),
        "moved_back": figures.thrashing,
        "scalings": figures.scale_ups + figures.scale_downs,
        "hit_rate": figures.hit_rate,
        "ttft_p99_ms": figures.ttft_p99_ms,
    }


def _saved(figures: Figures | None, against: Figures | None) -> float | None:
    """Percent of the hours."""
    if figures is None or against is None:
        return None
    return round(100 * (1 - figures.replica_hours / against.replica_hours), 1)


def startups(ours: Sequence[str], seed: int) -> list[dict[str, object]]:
    """A step to twice the load under three start-up times: one that nobody can foresee, and one that comes each day
    (of forty minutes, three times)."""
    cases = {
        "step": (partial(loads.step, low=2.5, seconds=3_000.0), ""),
        "daily_step": (partial(loads.daily_step, low=1.5, day_s=2_400.0), ":season_s=2400"),
    }
    rows: list[dict[str, object]] = []
    for (name, (shape, season)), startup_s in product(cases.items(), (10.0, 90.0, 600.0)):
        settings = Settings(starting=Starting(startup_s), most=24, initial=3, routing=ROUTING, seed=seed)
        trials = Trials(Load(name, tuple(shape(seed)), settings))
        for policy in ("concurrency", *ours):
            figures = trials.full(policy + (season if policy == "forecast" else ""))
            rows.append({"startup_s": startup_s, **row(trials.load, figures, None)})
    return rows


if __name__ == "__main__":
    main()
