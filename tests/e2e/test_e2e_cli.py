"""The command line end to end on the simulated engine: real processes, real etcd, no mocks."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.local.state import Home
from tests.support.stack import Cli
from tests.support.waiting import eventually_blocking

pytestmark = pytest.mark.e2e


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    command = Cli(tmp_path / "home")
    yield command
    command.run("down", timeout_s=90)
    assert command.left() == []


def completed(api: str, request_id: str = "any") -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{api}/completions",
        json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}).encode(),
        {"content-type": "application/json", "x-request-id": request_id},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def test_a_day_in_the_life_of_a_stack(cli: Cli, tmp_path: Path) -> None:
    up = cli.json("up", "--engine", "sim", "--replicas", "2", "--nodes", "3")
    assert up["already_running"] is False
    again = cli.json("up")
    assert again["already_running"] is True
    assert again["endpoints"] == up["endpoints"]

    assert completed(up["endpoints"]["http"][0])["usage"]["completion_tokens"] == 4

    status = cli.json("status")
    assert [(d["ready"], d["desired"]) for d in status["deployments"]] == [(2, 2)]
    assert {r["state"] for r in status["replicas"]} == {"ready"}
    assert {leader["role"] for leader in status["leaders"]} == {"scaler", "planner"}
    assert status["registry"]["stale"] is False
    assert "tiny-0" in cli.run("status").stdout

    assert cli.json("scale", "tiny", "3")["previous"] == 2
    assert cli.json("status")["unplaced"] == []
    cli.json("scale", "tiny", "5", "--no-wait")
    eventually_blocking(lambda: bool(cli.json("status")["unplaced"]), "the planner says what has no place", 60)
    (waiting,) = cli.json("status")["unplaced"]
    assert (waiting["deployment"], waiting["replicas"]) == ("tiny", 2)
    assert "of 3 nodes 0 fit" in waiting["reason"]
    assert f"tiny: 2 waiting for a place: {waiting['reason']}" in cli.run("status").stdout
    assert "of 3 nodes 0 fit" in cli.run("scale", "tiny", "5", "--timeout", "1", status=4).stderr
    elsewhere = ("--registry", up["endpoints"]["registry"][0])
    assert cli.json("status", *elsewhere)["unplaced"] is None, "no planner was named, so why is not known"
    assert "--planner" in cli.run("status", *elsewhere).stdout
    named = cli.json("status", *elsewhere, "--planner", up["endpoints"]["planner"])
    assert named["unplaced"] == [waiting]
    cli.json("scale", "tiny", "3")
    explained = cli.json("explain", "word " * 200)
    assert len(explained["candidates"]) == 3
    assert explained["replica"] in {c["replica"] for c in explained["candidates"]}
    assert cli.json("logs", "tiny-0")["lines"]

    model = status["deployments"][0]["model"]
    (tmp_path / "second.yaml").write_text(f"name: second\nmodel: {model}\nengine: sim\nreplicas: 0\n")
    assert cli.json("deploy", "-f", str(tmp_path / "second.yaml"))["generation"] == 1

    node = next(r["node"] for r in cli.json("status")["replicas"] if r["replica"] == "tiny-0")
    assert cli.json("drain", "node", node)["replicas"] == ["tiny-0"]
    assert cli.json("drain", "node", node, "--undo")["draining"] is False
    cli.run("drain", "replica", "tiny-9", status=1)
    cli.run("scale", "nothing", "1", status=1)
    assert cli.json("delete", "second", "--yes") == {"deployment": "second", "deleted": True, "replicas": []}
    cli.run("delete", "second", "--yes", status=1)

    checks = {c["name"]: c["status"] for c in cli.json("doctor")}
    assert checks[f"router {up['endpoints']['router'][0]}"] == "ok"
    assert cli.json("down")["ended"] >= 8
    assert cli.left() == []
    assert not cli.home.exists()


def test_a_past_request_is_explained_whichever_router_decided(cli: Cli) -> None:
    up = cli.json("up", "--engine", "sim", "--replicas", "2", "--routers", "2")
    for number, api in enumerate(up["endpoints"]["http"]):
        completed(api, request_id=f"mine-{number}")
        explained = cli.json("explain", "--request-id", f"mine-{number}")
        assert len(explained["candidates"]) == 2
        assert explained["attempt"] == 1
        assert explained["why"]
    shown = cli.run("explain", "--request-id", "mine-1").stdout
    assert "because " in shown
    forgotten = cli.run("explain", "--request-id", "nobodys", status=1).stderr
    assert all(router in forgotten for router in up["endpoints"]["router"])


def test_the_demo_compares_and_leaves_nothing(cli: Cli) -> None:
    began = time.monotonic()
    results = cli.json("demo", "--engine", "sim", "--requests", "40")
    assert time.monotonic() - began < 60
    assert set(results) == {"shared", "chat"}
    for figures in results.values():
        assert [f["policy"] for f in figures] == ["stoker", "round_robin"]
        assert [f["errors"] for f in figures] == [0, 0]
        assert figures[0]["hit_rate"] > figures[1]["hit_rate"]
    assert cli.left() == []
    assert not (cli.home / "demo").exists()


def test_a_bench_tells_each_round(cli: Cli) -> None:
    figures = cli.json("bench", "routing", "--engine", "sim", "--requests", "8", "--rounds", "2")
    assert [f["policy"] for f in figures] == ["stoker", "round_robin"]
    for f in figures:
        assert (f["errors"], f["requests"]) == (0, 16)
        assert [(r["policy"], r["requests"]) for r in f["rounds"]] == [(f["policy"], 8)] * 2


def started_services(cli: Cli, part: str, count: int) -> bool:
    state = Home(cli.home / part).read_state()
    return state is not None and sum(s.status == "ready" for s in state.services) >= count


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_what_was_started(cli: Cli, signum: signal.Signals) -> None:
    demo = cli.start("demo", "--engine", "sim")
    eventually_blocking(lambda: started_services(cli, "demo", 3), "some services are ready", 60)
    demo.send_signal(signum)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert cli.left() == []
    assert not (cli.home / "demo").exists()


def test_a_killed_demo_takes_its_stack_along(cli: Cli) -> None:
    demo = cli.start("demo", "--engine", "sim")
    eventually_blocking(lambda: started_services(cli, "demo", 8), "all services are ready", 60)
    demo.kill()
    demo.communicate()
    eventually_blocking(lambda: cli.left() == [], "nothing is left of a killed demo", 60)


def test_down_ends_what_a_killed_supervisor_left(cli: Cli) -> None:
    cli.run("up", "--engine", "sim", "--replicas", "1")
    state = Home(cli.home).read_state()
    assert state is not None
    supervisor = state.supervisor
    assert supervisor is not None
    assert supervisor.signal(signal.SIGKILL)
    eventually_blocking(lambda: not supervisor.alive(), "the supervisor is gone", 60)
    assert len(cli.left()) >= 7
    assert cli.json("down")["ended"] >= 7
    assert cli.left() == []


def test_foreground_stops_at_ctrl_c(cli: Cli) -> None:
    up = cli.start("up", "--engine", "sim", "--replicas", "1", "--foreground", "-o", "json")
    assert up.stdout is not None
    head = up.stdout.readline()
    assert head.startswith("{")
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=60)
    assert up.returncode == 130, err
    assert cli.left() == []
