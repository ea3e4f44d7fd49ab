"""The command line on a planner and a registry that run: apply, show, what-if, defrag, and a rack that drains."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stoker.registry.client import RegistryClient
from tests.integration.test_planner_facility import Fleet, fleet  # noqa: F401 - a fixture
from tests.support.facilities import hall
from tests.support.waiting import eventually


class Cli:
    """`stoker` against one fleet."""

    def __init__(self, registry: str, planner: str, home: Path) -> None:
        self._environment = {
            **os.environ,
            "STOKER_REGISTRY": registry,
            "STOKER_PLANNER": planner,
            "STOKER_HOME": str(home),
        }

    async def __call__(self, *arguments: str, status: int = 0) -> Any:
        program = "from stoker.cli.entry import main; main()"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            *arguments,
            "-o",
            "json",
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == status, err.decode()[-2000:]
        return json.loads(out or err)


@pytest.fixture
async def cli(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Cli]:  # noqa: F811
    async with fleet.planner() as planner:
        yield Cli(fleet.endpoint, planner, tmp_path)


async def test_an_operator_applies_a_facility_asks_and_drains_a_rack(
    fleet: Fleet,  # noqa: F811
    cli: Cli,
    tmp_path: Path,
) -> None:
    file = tmp_path / "hall.yaml"
    file.write_text(hall({"r1": "n[1-2]", "r2": "n[3-4]"}, rack_kw=7))
    await fleet.host("n1", "n2", "n3", "n4")
    assert (await cli("plan", "show"))["applied"] is False
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text(hall({"r1": "n[1-2]", "r2": "n3"}, rack_kw=7))
    (against,) = (await cli("plan", "apply", str(narrow)))["violations"]
    assert (against["limit"], against["subject"]) == ("node", "n4")
    written = await cli("plan", "apply", str(file))
    assert not written["violations"]
    assert "n[3-4]" in (await cli("plan", "show", "--document"))["document"]
    await fleet.want("chat", 4, gpus_per_node=1)
    await eventually(lambda: fleet.ready(4))

    async def planned() -> bool:
        shown = await cli("plan", "show")
        return bool(shown["planned_revision"] == written["revision"] and not shown["violations"])

    await eventually(planned, within_s=60)
    asked = await cli("plan", "what-if", "--without-rack", "r2", "--replicas", "chat=7")
    assert [entry["replicas"] for entry in asked["unplaced"]] == [2], "r1 carries five busy GPUs"
    assert (await cli("plan", "defrag", "--time", "1"))["moves"] == []
    there = await cli("plan", "where", "chat-0")
    assert there["words"][0].startswith("chat-0 is on n1 in rack r1")
    assert there["limits"][0]["capacity_w"] == 7000
    wanted = tmp_path / "deployments.yaml"
    wanted.write_text("{name: chat, model: m, engine: sim, replicas: 3, gpus_per_node: 1}\n")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(await cli("plan", "place", str(file), str(wanted))))
    against_fleet = await cli("plan", "diff", str(plan))
    assert (against_fleet["stop"], against_fleet["start"]) == (1, 0), "four run, and three are planned"
    assert against_fleet["stay"] + against_fleet["move"] == 3
    drained = await cli("drain", "rack", "r2")
    assert drained["nodes"] == ["n3", "n4"]
    await eventually(lambda: fleet.ready(4) and set(fleet.where().values()) <= {"n1", "n2"}, within_s=60)
    unknown = await cli("drain", "rack", "r9", status=1)
    assert "racks of nodes: r1, r2" in unknown["error"]["message"]
    # Somebody else writes between what this one read and wrote.
    async with RegistryClient([fleet.endpoint]) as other:
        await other.put_facility(hall({"r1": "n[1-2]"}))
    assert (await cli("plan", "apply", str(file), "--force"))["revision"] > written["revision"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\nsites: 3\n")
    assert (await cli("plan", "apply", str(bad), status=2))["error"]["reason"] == "BAD_FILE"
    assert (await cli("plan", "show", "--remove"))["removed"] is True
