"""Flights that Envoy carries: each is released once, however it ends or does not."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from stoker.api.envoy.v1 import access_log_pb2 as pb
from stoker.common.errors import Unavailable
from stoker.router.envoy import access_log
from stoker.router.envoy.flights import Ending, Flights
from stoker.router.flights.flight import Flight
from stoker.router.workers.siblings import Siblings
from tests.support.waiting import eventually


class Fake:
    """What a flight is told."""

    answered = Flight.answered

    def __init__(self) -> None:
        self.told: list[str] = []
        self.released = 0
        self.decided: Any = self
        self.target: Any = self
        self.id = "tiny-0"
        self.since = 100.0
        self.ago_s: float | None = None

    def first_token_ago_s(self) -> float | None:
        return self.ago_s

    def first_token_after(self, seconds: float) -> None:
        self.told.append(f"first token after {seconds:g} s")

    def __getattr__(self, name: str) -> Any:
        if name not in ("first_token", "served", "faulted", "erred"):
            raise AttributeError(name)
        return lambda: self.told.append(name)

    def abandon(self) -> None:
        self.released += 1

    def end(self) -> None:
        """As an admission, which lasts as long."""


class World:
    def __init__(self, siblings: Siblings | None = None) -> None:
        self.now = 100.0
        self.dead: list[str] = []
        self.moved: list[Fake] = []
        self.gone = False
        nonce = (siblings or Siblings.alone()).nonce
        self.flights = Flights(10.0, lambda: self.now, self.move, self.dead.append, nonce)

    def move(self, decided: Any, target: Any, request_id: str) -> Flight:
        if self.gone:
            raise Unavailable("it has left")
        flight = Fake()
        flight.id = target
        self.moved.append(flight)
        return cast(Flight, flight)

    def open(self, *spares: str, stream: bool = True) -> tuple[str, Fake]:
        flight: Any = Fake()
        name = self.flights.open(flight, flight, "completions", stream=stream, spares=cast(Any, spares))
        return name, flight


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Ending(200), ["served"]),
        (Ending(400), []),
        (Ending(500), ["erred"]),
        (Ending(501), []),
        (Ending(503, fault=True), ["faulted"]),
        (Ending(200, fault=True), ["faulted"]),
        (Ending(200, gone=True), []),
        (Ending(0), []),
    ],
)
def test_an_end_is_told_and_releases_once(world: World, ending: Ending, told: list[str]) -> None:
    name, flight = world.open()
    world.flights.ended(name, ending)
    world.flights.ended(name, ending)
    world.flights.drop(name)
    assert (flight.told, flight.released, len(world.flights)) == (told, 1, 0)
    assert not world.dead


def test_a_refused_connection_is_passed_on(world: World) -> None:
    name, _ = world.open()
    world.flights.ended(name, Ending(503, fault=True, refused=True))
    assert world.dead == ["tiny-0"]


REFUSED = Ending(0, fault=True, refused=True)


def test_a_failed_try_is_blamed_and_the_flight_goes_on_elsewhere(world: World) -> None:
    name, first = world.open("tiny-1", "tiny-2")
    world.flights.failed_try(name, REFUSED)
    world.flights.failed_try(name, Ending(503))
    second, third = world.moved
    assert (first.told, first.released, world.dead) == (["faulted"], 1, ["tiny-0"])
    assert (second.id, second.told, second.released) == ("tiny-1", ["erred"], 1)
    assert (third.id, third.told, third.released) == ("tiny-2", [], 0)
    world.flights.ended(name, Ending(200, tries=3))
    assert (third.told, third.released, len(world.flights)) == (["served"], 1, 0)
    assert (first.released, second.released) == (1, 1)


def test_the_last_try_is_settled_by_the_end_alone(world: World) -> None:
    name, first = world.open()
    world.flights.failed_try(name, REFUSED)
    assert (first.told, first.released, world.moved) == ([], 0, [])
    world.flights.ended(name, Ending(503, fault=True, refused=True, tries=1))
    assert (first.told, first.released) == (["faulted"], 1)


def test_an_answer_that_has_begun_is_not_tried_elsewhere(world: World) -> None:
    name, first = world.open("tiny-1")
    world.flights.failed_try(name, Ending(200, fault=True))
    assert (first.told, first.released, world.moved) == ([], 0, [])
    world.flights.ended(name, Ending(200, fault=True, tries=1))
    assert (first.told, first.released) == (["faulted"], 1)


def test_a_retry_that_envoy_did_not_make_blames_nobody_else(world: World) -> None:
    name, _ = world.open("tiny-1")
    world.flights.failed_try(name, Ending(503))
    world.flights.ended(name, Ending(503, tries=1))
    (second,) = world.moved
    assert (second.told, second.released) == ([], 1)


def test_a_spare_that_has_left_counts_nowhere(world: World) -> None:
    name, first = world.open("tiny-1", "tiny-2")
    world.gone = True
    world.flights.failed_try(name, REFUSED)
    world.flights.failed_try(name, REFUSED)
    world.flights.goes_on(name, answered=True)
    world.flights.ended(name, Ending(200, tries=3))
    assert (first.released, len(world.flights)) == (1, 0)


def test_a_dropped_flight_is_released_where_it_is_now(world: World) -> None:
    name, first = world.open("tiny-1")
    world.flights.failed_try(name, REFUSED)
    world.flights.close()
    assert (first.released, world.moved[0].released) == (1, 1)


def test_the_first_token_of_a_stream_is_told_once_and_of_no_other(world: World) -> None:
    (name, stream), (other, whole) = world.open(), world.open(stream=False)
    for answered in (False, True, True):
        world.flights.goes_on(name, answered=answered)
        world.flights.goes_on(other, answered=answered)
    assert (stream.told, whole.told) == (["first_token"], [])


@pytest.mark.parametrize(("ago_s", "said"), [(None, 3), (2.5, 0.5), (2.999, 0.01)])
def test_a_streams_first_token_is_not_that_of_its_headers(world: World, ago_s: float | None, said: float) -> None:
    name, flight = world.open()
    flight.ago_s = ago_s
    world.now += 3.0
    world.flights.ended(name, Ending(200, first_byte_s=0.01, tries=1))
    assert flight.told == [f"first token after {said:g} s", "served"]


def test_silence_ends_a_flight_and_a_word_keeps_it(world: World) -> None:
    (_, silent), (name, heard) = world.open(), world.open()
    world.now += 9
    world.flights.goes_on(name, answered=False)
    world.flights.sweep()
    world.now += 2
    world.flights.sweep()
    assert (silent.released, heard.released) == (1, 0)


def test_what_may_not_have_arrived_is_undone_unless_envoy_told_of_it(world: World) -> None:
    (lost, never), (known, begun) = world.open(), world.open()
    world.flights.goes_on(known, answered=False)
    for name in (lost, known, lost):
        world.flights.undo(name)
    assert (never.released, begun.released) == (1, 0)


def test_strangers_end_nothing(world: World) -> None:
    _, flight = world.open()
    for name in ("", "0" * 24, "\xff"):
        world.flights.ended(name, Ending(200))
        world.flights.goes_on(name, answered=True)
    assert (flight.told, flight.released) == ([], 0)


def test_close_releases_all(world: World) -> None:
    opened = [world.open()[1] for _ in range(5)]
    world.flights.close()
    assert [flight.released for flight in opened] == [1] * 5


def entry(name: str, kind: Any = pb.ACCESS_LOG_TYPE_DOWNSTREAM_END, **common: Any) -> pb.HttpEntry:
    return pb.HttpEntry(
        common_properties=pb.Common(access_log_type=kind, **common),
        request=pb.RequestProperties(request_headers={access_log.FLIGHT_HEADER: name}),
    )


def test_entries_under_way_do_not_end_a_flight(world: World) -> None:
    name, flight = world.open()
    access_log.take(entry(name, pb.ACCESS_LOG_TYPE_DOWNSTREAM_PERIODIC), world.flights)
    assert flight.told == []
    first = Duration(nanos=5)
    begun = entry(name, pb.ACCESS_LOG_TYPE_DOWNSTREAM_PERIODIC, time_to_first_upstream_rx_byte=first)
    access_log.take(begun, world.flights)
    assert flight.told == [], "headers are no token"
    begun.response.response_body_bytes = 5
    access_log.take(begun, world.flights)
    assert (flight.told, flight.released) == (["first_token"], 0)
    access_log.take(entry(name), world.flights)
    assert flight.released == 1


def test_a_failed_connection_is_a_fault_and_a_refused_one_is_proof(world: World) -> None:
    (one, silent), (two, dead) = world.open(), world.open()
    flags = pb.ResponseFlags(upstream_connection_failure=True)
    access_log.take(entry(one, response_flags=flags), world.flights)
    assert (silent.told, world.dead) == (["faulted"], [])
    says = "delayed connect error: Connection refused"
    access_log.take(entry(two, response_flags=flags, upstream_transport_failure_reason=says), world.flights)
    assert (dead.told, world.dead) == (["faulted"], ["tiny-0"])


def test_time_that_its_caller_set_blames_nobody(world: World) -> None:
    for status, flags, more in (
        (504, pb.ResponseFlags(upstream_request_timeout=True), {}),
        (200, pb.ResponseFlags(upstream_request_timeout=True), {}),
        (200, pb.ResponseFlags(stream_idle_timeout=True), {"time_to_first_upstream_rx_byte": Duration(nanos=5)}),
    ):
        name, hurried = world.open()
        late = entry(name, response_flags=flags, **more)
        late.response.response_code.value = status
        access_log.take(late, world.flights)
        assert (hurried.told, hurried.released) == ([], 1)


def test_an_engine_that_never_spoke_is_blamed(world: World) -> None:
    name, silent = world.open()
    late = entry(name, response_flags=pb.ResponseFlags(stream_idle_timeout=True))
    late.response.response_code.value = 504
    access_log.take(late, world.flights)
    assert (silent.told, silent.released) == (["erred"], 1)


def test_bytes_of_anybody_never_raise_and_never_end_a_flight(world: World) -> None:
    _, flight = world.open()
    rng = random.Random(7)
    for _ in range(2000):
        message = access_log.decoded(rng.randbytes(rng.randrange(64)))
        for each in message.http_logs.log_entry:
            access_log.take(each, world.flights)
    assert flight.released == 0


async def test_an_entry_that_another_worker_got_ends_the_flight(tmp_path: Path) -> None:
    workers = [Siblings(tmp_path, number, 2) for number in range(2)]
    worlds = [World(worker) for worker in workers]
    for worker, world in zip(workers, worlds, strict=True):
        access_log.add_to(cast(Any, SimpleNamespace(add_generic_rpc_handlers=lambda _: None)), world.flights, worker)
        await worker.start()
    try:
        name, flight = worlds[1].open()
        ending = entry(name)
        ending.response.response_code.value = 200
        access_log.take_or_pass_on(ending, worlds[0].flights, workers[0])
        await eventually(lambda: flight.released == 1, "the flight ends", 10)
        assert flight.told == ["served"]
    finally:
        for worker in workers:
            await worker.close()
