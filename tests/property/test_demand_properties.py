"""Demand through registries that come and go and watchers that lag: in the end the watcher knows what was counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.core.demand import DemandMerge, DemandStore
from stoker.registry.core.outflow import Interest, Outflow

MODELS = ("chat", "code", "poem")
STEP = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(MODELS)),
    st.tuples(st.just("report"), st.booleans()),
    st.tuples(st.just("move"), st.booleans()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("hear"), st.integers(0, 1)),
    st.tuples(st.just("reconnect"), st.integers(0, 1)),
)


class World:
    """One router, two registries, one watcher of both."""

    def __init__(self) -> None:
        self.began, self.sequence, self.at = 1, 0, 0
        self.counts: dict[str, int] = {}
        self.changed: set[str] = set()
        self.stores = [DemandStore(), DemandStore()]
        self.flows = [self._flow(), self._flow()]
        self.merge = DemandMerge()
        self.known: dict[tuple[int, str], int] = {}
        self.gone = False

    def _flow(self) -> Outflow:
        return Outflow(Interest.of(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_DEMAND])))

    def ask(self, model: str) -> None:
        self.counts[model] = self.counts.get(model, 0) + 1
        self.changed.add(model)

    def report(self, whole: bool) -> None:
        self.sequence += 1
        names = self.counts if whole else self.changed
        report = registry_pb2.RouterDemand(
            router_id="r",
            began_ns=self.began,
            sequence=self.sequence,
            demand=[registry_pb2.Demand(model=model, arrivals=self.counts[model]) for model in sorted(names)],
        )
        self.changed.clear()
        news = self.stores[self.at].offer(report, 0.0)
        if news is not None:
            self.flows[self.at].demand(news, 0.0)

    def move(self, whole: bool) -> None:
        """Its stream ends, and begins at the other registry with all that there is."""
        gone = self.stores[self.at].gone("r")
        if gone is not None:
            self.flows[self.at].demand(gone, 0.0)
        self.at = 1 - self.at
        self.report(True)

    def restart(self, _: None) -> None:
        """Another process under the same name, which counts anew."""
        self.began, self.sequence, self.counts = self.began + 1, 0, {}
        self.changed.clear()
        self.report(True)

    def hear(self, source: int) -> None:
        for message in self.flows[source].take_soft(0.0):
            told = message.demand
            if self.merge.offer(str(source), told):
                self.gone = told.gone
                for demand in told.demand:
                    key = told.began_ns, demand.model
                    assert demand.arrivals >= self.known.get(key, 0), "counters never fall"
                    self.known[key] = demand.arrivals

    def reconnect(self, source: int) -> None:
        """The watcher's stream breaks: what waited is lost, and what stands is told."""
        self.flows[source] = self._flow()
        for standing in self.stores[source].all(0.0):
            self.flows[source].demand(standing, 0.0)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(STEP, max_size=60))
def test_in_the_end_a_watcher_knows_what_was_counted(steps: list[tuple[str, object]]) -> None:
    world = World()
    for name, argument in steps:
        getattr(world, name)(argument)
    world.report(True)
    for source in (1 - world.at, world.at):
        world.hear(source)
    assert {model: count for (began, model), count in world.known.items() if began == world.began} == world.counts
    assert not world.gone
