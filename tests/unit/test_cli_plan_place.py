"""`stoker plan place`, `diff` and `explain` as a script sees them, on the examples that are shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.cli.fleet import Fleet
from stoker.cli.plan import diff as diff_verb
from stoker.cli.plan import plans
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.placement import Member, Need, Pair, PlacementProblem
from stoker.planner.core.units import BytesPerSecond
from tests.support.command import answer, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = (str(EXAMPLES / "facilities" / "two-rows.yaml"), str(EXAMPLES / "deployments.yaml"))
QUICK = ("--search-s", "0")


def test_the_examples_are_placed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(monkeypatch, capsys, "plan", "place", *FILES, *QUICK)
    assert value.keys() == {
        *("facility", "deployments", "replicas", "replicas_placed", "gpus", "gpus_used", "feasible", "proven"),
        *("seconds", "placed", "unplaced", "scores", "what_if"),
    }
    assert (value["replicas"], value["replicas_placed"], value["gpus"], value["gpus_used"]) == (49, 49, 256, 148)
    assert value["feasible"]
    assert value["what_if"] is None
    used = [(m["node"], gpu) for each in value["placed"] for m in each["members"] for gpu in m["gpus"]]
    assert len(used) == len(set(used)) == 148
    assert value["placed"][0].keys() == {"replica", "deployment", "moved", "members"}
    assert value["scores"][0].keys() == {"goal", "value", "bound", "proven"}
    embed = {m["rack"] for each in value["placed"] if each["deployment"] == "embed" for m in each["members"]}
    assert len(embed) >= 3, "a third of them at most in one rack"


def test_what_is_placed_stays_and_what_a_lost_rack_held_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answer(monkeypatch, capsys, "plan", "place", *FILES, *QUICK)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(before))
    again = answer(monkeypatch, capsys, "plan", "place", *FILES, *QUICK, "--standing", str(plan))
    assert again["placed"] == before["placed"]
    lost = answer(monkeypatch, capsys, "plan", "place", *FILES, *QUICK, "--without", "row1-r1")
    held = {e["replica"] for e in before["placed"] for m in e["members"] if m["rack"] == "row1-r1"}
    assert held
    assert set(lost["what_if"]["moved"]) == held
    assert lost["what_if"]["displaced"] == []
    assert lost["gpus"] == 256 - 32, "those of the lost rack are no longer there"
    assert not {m["rack"] for e in lost["placed"] for m in e["members"]} & {"row1-r1"}
    after = tmp_path / "after.json"
    after.write_text(json.dumps(lost))
    value = answer(monkeypatch, capsys, "plan", "diff", str(plan), str(after))
    assert value.keys() == {"stay", "move", "start", "stop", "warm_tokens_lost", "changes"}
    assert (value["stay"], value["move"], value["start"], value["stop"]) == (49 - len(held), len(held), 0, 0)
    assert value["warm_tokens_lost"] is None
    assert {change["replica"] for change in value["changes"]} == held


def test_added_nodes_take_what_had_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facility = tmp_path / "facility.yaml"
    facility.write_text("name: x\nsites: {s: {racks: {r1: {nodes: {n1: dgx-h100}}, r2: {height_u: 42}}}}\n")
    deployments = tmp_path / "deployments.yaml"
    deployments.write_text("{name: chat, model: m, engine: vllm, replicas: 3, gpus_per_node: 8}\n")
    assert run(monkeypatch, "plan", "place", str(facility), str(deployments), *QUICK, "-o", "json") == 1
    short = json.loads(capsys.readouterr().out)
    assert not short["feasible"]
    assert short["unplaced"][0]["replicas"] == 2
    assert short["unplaced"][0]["limits"]
    assert short["unplaced"][0]["why"]
    added = ("--add", "dgx-h100@r2=2")
    value = answer(monkeypatch, capsys, "plan", "place", str(facility), str(deployments), *QUICK, *added)
    assert value["feasible"]
    assert {m["node"] for e in value["placed"] for m in e["members"]} == {"n1", "r2-new1", "r2-new2"}


def test_what_was_sized_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(EXAMPLES / "models" / "llama-3.1-8b.json")
    load = ("--isl", "4000", "--osl", "500", "--rps", "20", "--split", "never")
    told = answer(monkeypatch, capsys, "plan", "size", "--model", model, "--gpu", "h100-sxm", *load)
    size = tmp_path / "chat.json"
    size.write_text(json.dumps(told))
    value = answer(monkeypatch, capsys, "plan", "place", *FILES, *QUICK, "--size", f"chat={size}")
    chat = [each for each in value["placed"] if each["deployment"] == "chat"]
    pool = told["best"]["pools"][0]
    assert len(chat) == pool["replicas"]
    assert {len(member["gpus"]) for each in chat for member in each["members"]} == {pool["gpus_per_replica"]}


def test_pools_apart_are_deployments_that_send_kv(tmp_path: Path) -> None:
    pool = {"gpu": "h100-sxm", "tp": 4, "gpus_per_replica": 16, "nodes_per_replica": 2, "peer_bytes_per_s": 7}
    pools = [{**pool, "role": "prefill", "replicas": 3}, {**pool, "role": "decode", "replicas": 5}]
    size = tmp_path / "size.json"
    size.write_text(json.dumps({"best": {"pools": pools, "kv_transfer_bytes_per_s": 99}}))
    needs = (Need("chat-prefill", 1), Need("chat-decode", 1), Need("code", 2))
    found = plans.sized(PlacementProblem(Facility("f"), needs), f"chat={size}").needs
    assert [(need.replicas, need.members, need.gpus, need.tensor_parallel) for need in found] == [
        (3, 2, 8, 4),
        (5, 2, 8, 4),
        (2, 1, 1, 1),
    ]
    assert found[0].pair == Pair("chat-decode", BytesPerSecond(99))
    assert [need.peer_rate for need in found] == [7, 7, 0]


def test_people_read_tables_and_see_drawings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    assert run(monkeypatch, "plan", "place", *FILES, *QUICK, "--svg", str(svg), "--html", str(html)) == 0
    captured = capsys.readouterr()
    assert "two-rows: 49 of 49 replicas placed on 148 of 256 GPUs" in captured.out
    assert "reason-0 dgx-" in " ".join(captured.out.split())
    assert f"drawn into {svg}" in captured.err
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!doctype html>")
    assert "reason-0" in html.read_text()


def test_a_replica_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(monkeypatch, capsys, "plan", "explain", "reason-0", *FILES, *QUICK)
    assert value.keys() == {
        *("name", "kind", "why", "placed", "unplaced", "scores", "limits", "alternatives", "no_more_because")
    }
    assert value["kind"] == "replica"
    assert [len(each["members"]) for each in value["placed"]] == [2]
    assert value["limits"][0].keys() == {"limit", "used_kw", "capacity_kw"}
    here = {member["node"] for member in value["placed"][0]["members"]}
    assert value["alternatives"]
    assert all(not here & {member["node"] for member in place["members"]} for place in value["alternatives"])


def test_a_deployment_is_explained_by_its_next_replica(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = answer(monkeypatch, capsys, "plan", "explain", "chat", *FILES, *QUICK)
    assert (value["kind"], len(value["placed"]), value["why"]) == ("deployment", 10, "one more has a place")
    assert run(monkeypatch, "plan", "explain", "chat", *FILES, *QUICK) == 0
    assert "where one more would be" in capsys.readouterr().out


BAD = "name: a\nmodel: m\nengine: vllm\n---\nname: b\nmodle: m\nengine: vllm\n---\nname: a\nmodel: m\nengine: vllm\n"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("place", FILES[0], "BAD"), 2, ":6: modle: no such setting; did you mean model?"),
        (("place", FILES[0], "BAD"), 2, ":9: name: 'a' is there twice"),
        (("place", str(EXAMPLES / "facilities" / "nvl72-2mw.yaml"), FILES[1]), 2, "lists no nodes to place on"),
        (("place", *FILES, *QUICK, "--without", "r9"), 2, "'r9' is neither a node nor a rack here"),
        (("place", *FILES, *QUICK, "--add", "dgx-h100"), 2, "'dgx-h100' is not TYPE@RACK"),
        (("place", *FILES, *QUICK, "--add", "x@row1-r1"), 2, "'x' is no node type here"),
        (("place", *FILES, *QUICK, "--add", "dgx-h100@x"), 2, "'x' is no rack here"),
        (("place", *FILES, *QUICK, "--svg", "/nonexistent/x.svg"), 2, "cannot write /nonexistent/x.svg"),
        (("place", *FILES, *QUICK, "--standing", "BAD"), 2, "is no plan; write one with `stoker plan place"),
        (("place", *FILES, *QUICK, "--size", "chat"), 2, "'chat' is not NAME=FILE"),
        (("place", *FILES, *QUICK, "--size", "chat=/nonexistent"), 2, "cannot read /nonexistent"),
        (("place", *FILES, *QUICK, "--size", f"chat={FILES[1]}"), 2, "has no sizing with a plan"),
        (("place", FILES[1], FILES[0]), 2, "deployments.yaml:11: a second document after `---`; this file has one"),
        (("place", *FILES, *QUICK, "--add", "dgx-h100@row1-r1=0"), 2, "is not TYPE@RACK or TYPE@RACK=COUNT"),
        (("place", *FILES, *QUICK, "--add", "dgx-h100@row1-r1=2"), 2, "free units for 1 more dgx-h100, not 2"),
        (("diff", "BAD", "BAD"), 2, "is no plan"),
        (("diff", "/nonexistent.json", "BAD"), 2, "cannot read /nonexistent.json"),
        (("explain", "nobody", *FILES, *QUICK), 2, "'nobody' is neither a replica of this plan nor a deployment"),
    ],
)
def test_mistakes_are_told(
    arguments: tuple[str, ...],
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    assert run(monkeypatch, "plan", *(str(bad) if each == "BAD" else each for each in arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


def test_a_plan_is_compared_with_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(replica: str, gpu: int, wanted: records_pb2.Wanted.ValueType) -> records_pb2.Assignment:
        members = [records_pb2.GangMember(rank=0, node_id="n1", gpu_indices=[gpu])]
        return records_pb2.Assignment(replica_id=replica, deployment="chat", members=members, wanted=wanted)

    engine = records_pb2.EngineInfo(total_blocks=100, block_size=16)
    fleet = Fleet(
        registry_pb2.Records(
            assignments=[
                record("chat-0", 0, records_pb2.WANTED_RUN),
                record("chat-1", 1, records_pb2.WANTED_RUN),
                record("chat-2", 2, records_pb2.WANTED_DRAIN),
            ],
            replicas=[records_pb2.Replica(replica_id="chat-1", deployment="chat", engine=engine)],
        ),
        {"chat-1": registry_pb2.ReplicaLoad(replica_id="chat-1", cache_query_tokens=1_000, cache_hit_tokens=250)},
    )

    async def told(registry: str) -> Any:
        assert registry == "127.0.0.1:1"
        return diff_verb.standing(fleet), diff_verb.warm_tokens(fleet)

    monkeypatch.setattr(diff_verb, "_running", told)
    plan = tmp_path / "plan.json"
    placed = [("chat-0", 0), ("chat-1", 5)]
    plan.write_text(
        json.dumps(
            {
                "placed": [
                    {"replica": name, "deployment": "chat", "members": [{"node": "n1", "gpus": [gpu]}]}
                    for name, gpu in placed
                ]
            }
        )
    )
    value = answer(monkeypatch, capsys, "plan", "diff", str(plan), "--registry", "127.0.0.1:1")
    assert (value["stay"], value["move"], value["stop"], value["start"]) == (1, 1, 0, 0)
    assert value["warm_tokens_lost"] == 0.25 * 100 * 16


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "1", '{"placed": 1}', '{"placed": [{}]}', "{", "[" * 3_000),
        '{"placed": [{"replica": "a", "deployment": "b", "members": [{"node": "n", "gpus": [-1]}]}]}',
        '{"placed": [{"replica": 1, "deployment": "b", "members": []}]}',
    ],
)
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(Exception, match="is no plan"):
        plans.read(path)


def test_gpus_are_told_in_ranges() -> None:
    members = (Member("n1", (0, 1, 2, 3, 6, 7)), Member("n2", (5,)), Member("n3"))
    assert plans.where(members) == "n1[0-3,6,7] n2[5] n3"
