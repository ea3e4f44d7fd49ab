"""Absurd questions cost a planner one refusal, or little time: no memory, and nobody else's turn."""

from __future__ import annotations

import math
import threading
import time

import pytest

from stoker.api.planner.v1 import planner_pb2
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.planner import answers
from stoker.planner.computing import Abandoned, Task
from stoker.planner.core.holding import Violation
from stoker.planner.core.values import Deployment, Desired, Problem
from stoker.planner.sizing_answer import size
from tests.support.facilities import hall
from tests.support.registry import spec

TEXT = hall({"r1": "n[0-3]", "r2": "n[4-7]"}, gpus=8)
MOST = 4294967295


def waited_for() -> Task:
    return Task(60.0, threading.Event())


def problem() -> Problem:
    return Problem()


def test_a_type_that_is_not_there_is_named() -> None:
    facility = answers.read(TEXT, waited_for()).facility
    for fill in ("\0\x1b[31m", "dgx-h1000"):
        with pytest.raises(StokerError, match=r"^fill: .* is no type here; known: .*dgx-h100") as error:
            answers.capacity(facility, planner_pb2.CapacityRequest(fill=fill), waited_for())
        assert error.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize("replicas", [10_001, 1_000_000, MOST])
def test_what_if_refuses_more_replicas_than_a_deployment_may_have(replicas: int) -> None:
    """Each is a row of a list: four billion of them take all memory."""
    asked = planner_pb2.WhatIfRequest(replicas={"chat": replicas})
    with pytest.raises(StokerError, match=f"replicas: 'chat': {replicas:,} is too many; at most 10,000"):
        answers.what_if(problem(), asked, waited_for())


def test_more_replicas_than_a_fleet_has_are_refused() -> None:
    many = [spec(f"d{number}", replicas=10_000) for number in range(11)]
    with pytest.raises(StokerError, match="deployments: ask for 110,000 replicas; at most 100,000"):
        answers.place(answers.read(TEXT, waited_for()), planner_pb2.PlaceRequest(deployments=many), waited_for())


def test_replicas_without_a_place_cost_next_to_nothing() -> None:
    """Each was searched for anew, among all deployments: a minute for a fleet that asks for far too much."""
    many = [spec(f"d{number}", replicas=100, gpus_per_node=1) for number in range(1_000)]
    began = time.process_time()
    answer = answers.place(answers.read(TEXT, waited_for()), planner_pb2.PlaceRequest(deployments=many), waited_for())
    assert time.process_time() - began < 5
    assert len(answer.placed) == 64
    assert sum(each.replicas for each in answer.unplaced) == 100_000 - 64


@pytest.mark.parametrize("time_limit_s", [0.0, 5.0])
def test_placing_ends_once_nobody_waits(time_limit_s: float) -> None:
    left = waited_for()
    left.stop.set()
    asked = planner_pb2.PlaceRequest(deployments=[spec("chat", gpus_per_node=1)], time_limit_s=time_limit_s)
    with pytest.raises(Abandoned):
        answers.place(answers.read(TEXT, waited_for()), asked, left)


def test_reading_a_facility_ends_once_nobody_waits() -> None:
    left = waited_for()
    left.stop.set()
    with pytest.raises(Abandoned):
        answers.read(TEXT, left)
    with pytest.raises(Abandoned):
        answers.validate(TEXT, problem(), left)


def test_a_share_of_requests_that_nobody_means_is_refused() -> None:
    for attainment in (1e-308, 1e-17, 0.009, math.inf):
        with pytest.raises(StokerError, match="attainment"):
            size(
                planner_pb2.SizeRequest(input_tokens=1, output_tokens=1, requests_per_s=1, attainment=attainment),
                waited_for(),
            )


def test_what_if_takes_a_deployment_that_is_there_for_a_mistake() -> None:
    there = Problem(deployments=[Deployment("chat", "s", "sim", 1)], desired={"chat": Desired(1)})
    asked = planner_pb2.WhatIfRequest(deployments=[spec("chat", replicas=3, gpus_per_node=1)])
    with pytest.raises(StokerError, match="deployments: 'chat' is there already; give another count in `replicas`"):
        answers.what_if(there, asked, waited_for())


def test_an_answer_has_room_for_what_no_longer_holds() -> None:
    """A wrong facility can list none of ten thousand hosts, with a hundred replicas named for each."""
    names = tuple(f"a-deployment-with-a-rather-long-name-{n}" for n in range(100))
    many = [Violation("node", f"n{n}", "not in the facility", names) for n in range(10_000)]
    told = planner_pb2.GetPlannerStatusResponse(violations=answers.violation_messages(many))
    assert len(told.violations) == 1_000
    assert told.ByteSize() < rpc.MAX_MESSAGE_BYTES
