"""What the agent keeps on disk, and what it reads there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.common.fingerprint import fingerprint
from stoker.node_agent import state_files, tokenizer_files
from stoker.node_agent.core.digest import CacheDigest
from stoker.node_agent.core.gang import State
from stoker.node_agent.core.lifecycle import Member
from stoker.node_agent.core.task import Task
from stoker.node_agent.engine.events import BlockHash, Stored
from stoker.node_agent.gpus import pci_address
from stoker.node_agent.state_files import Address, DigestCopy, Record, StateDir, StateDirInUse, Tail

LIFE = "0f"
TASK = Task("r-0", "r", 7, "m", "m", "sim", engine_args=("--a", "b"), env={"K": "v"}, lora_adapters=(("l", "/p"),))


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    directory = StateDir(tmp_path / "state")
    directory.open()
    return directory


def record(**fields: object) -> Record:
    member = Member(TASK, since=0, state=State.READY, attempt=3, epoch=99, startup_s=1.5, exit_code=-9)
    before = state_files.record_of(member)
    return Record(**{**{f: getattr(before, f) for f in before.__dataclass_fields__}, **fields})


def test_a_record_comes_back_as_it_was(state: StateDir) -> None:
    kept = record(token=LIFE, address=Address("127.0.0.1", 1, 2, 3), pid=5, started=6, argv_sha256="x")
    state.write(kept)
    assert list(state.records()) == [kept]
    member = kept.member(now=50.0)
    assert (member.task, member.state, member.attempt, member.epoch) == (TASK, State.READY, 3, 99)
    assert member.ready_at == 50.0
    state.remove(TASK.key)
    assert list(state.records()) == []


def test_incarnations_rise_though_the_clock_is_set_back(state: StateDir, tmp_path: Path) -> None:
    assert state.next_incarnation(1_000) == 1_000
    assert state.next_incarnation(2_000) == 2_000
    state.close()
    restarted = StateDir(tmp_path / "state")
    restarted.open()
    assert restarted.next_incarnation(500) == 2_001
    for rubbish in ("", "soon", "-7", str(1 << 70)):
        (tmp_path / "state" / "incarnation").write_text(rubbish)
        assert restarted.next_incarnation(3_000) == 3_000


def test_models_that_were_ready_are_remembered_by_later_agents(state: StateDir, tmp_path: Path) -> None:
    assert not state.was_ready("org/model")
    state.note_ready("org/model")
    state.note_ready("/models/other")
    state.close()
    later = StateDir(tmp_path / "state")
    later.open()
    assert later.was_ready("org/model")
    for number in range(1_000):
        later.note_ready(f"m{number}")
        later.note_ready("/models/other")
    assert not later.was_ready("org/model"), "the longest unused gives way"
    assert later.was_ready("/models/other")
    later.close()
    (tmp_path / "state" / "models.json").write_text("{half")
    again = StateDir(tmp_path / "state")
    again.open()
    assert not again.was_ready("/models/other")


def test_an_unreadable_record_is_set_aside(state: StateDir, tmp_path: Path) -> None:
    state.write(record())
    (tmp_path / "state/members/broken.json").write_text('{"task": 3')
    assert len(list(state.records())) == 1
    assert (tmp_path / "state/members/broken.unreadable").exists()


def test_a_draft_left_by_a_killed_agent_is_no_record(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "state/members/.r-0.0.json.draft").write_text("half a rec")
    assert list(state.records()) == []


def test_one_agent_a_directory(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(StateDirInUse, match="another agent"):
        StateDir(tmp_path / "state").open()
    state.close()
    StateDir(tmp_path / "state").open()


def test_digests_come_back(state: StateDir) -> None:
    digest = CacheDigest("m")
    digest.begin(4)
    hashes: list[BlockHash] = [b"bytes", 2**63 + 5]
    for at, hash_ in enumerate(hashes):
        digest.apply([Stored((hash_,), None, (at, 1), 2, None, None, ((),), "GPU")])
    state.write_digests("k", [DigestCopy(digest.export(), 17), DigestCopy(CacheDigest("m").export(), 0)])
    copy, other = state.read_digests("k")
    assert (copy.next_seq, other.next_seq) == (17, 0)
    heir = CacheDigest("m")
    heir.begin(4)
    assert heir.restore(copy.image)
    assert heir.held() == digest.held()
    assert state.read_digests("other") == []


def test_logs_are_rotated_and_followed_across(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {i}\n" for i in range(1000)) + "half")
    tail = Tail(path)
    assert tail.last(3) == ["line 998", "line 999", "half"]
    assert not state_files.bound_log(path, 1_000_000)
    assert state_files.bound_log(path, 1000)
    assert path.stat().st_size == 0
    assert (tmp_path / "x.log.1").read_text().startswith("line 0\n")
    with path.open("a") as log:
        log.write("new\npart")
        log.flush()
        assert tail.more() == ["new"]
        log.write("ial\n")
    assert tail.more() == ["partial"]


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert state_files.last_lines(tmp_path / "none", 5) == []


def _model(tmp_path: Path, **files: str) -> Task:
    for name, text in {"tokenizer.json": "{}", "config.json": "{}", **files}.items():
        (tmp_path / name).write_text(text)
    return Task("r-0", "r", 1, str(tmp_path), "m", "sim")


def test_only_tokenizer_files_are_found(tmp_path: Path) -> None:
    task = _model(tmp_path, **{"model.safetensors": "weights", "chat_template.jinja": "T"})
    assert set(tokenizer_files.find(task)) == {"tokenizer.json", "config.json", "chat_template.jinja"}


def test_the_fingerprint_follows_tokenizer_and_template_wherever_it_is(tmp_path: Path) -> None:
    in_file = {"tokenizer.json": b"{}", "chat_template.jinja": b"T"}
    in_config = {"tokenizer.json": b"{}", "tokenizer_config.json": json.dumps({"chat_template": "T"}).encode()}
    assert fingerprint(in_file) == fingerprint(in_config)
    assert fingerprint({**in_file, "chat_template.jinja": b"U"}) != fingerprint(in_file)
    assert fingerprint({**in_file, "tokenizer.json": b"[]"}) != fingerprint(in_file)
    assert fingerprint({"config.json": b"{}"}) == ""


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--org--name/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    refs = tmp_path / "hub/models--org--name/refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    task = Task("r-0", "r", 1, "org/name", "m", "vllm", env={"HF_HOME": str(tmp_path)})
    assert set(tokenizer_files.find(task)) == {"tokenizer.json"}
    assert tokenizer_files.find(Task("r-0", "r", 1, "org/absent", "m", "vllm", env={"HF_HOME": str(tmp_path)})) == {}


def test_a_template_of_the_command_line_wins(tmp_path: Path) -> None:
    task = _model(tmp_path, **{"chat_template.jinja": "own"})
    own = Task("r-0", "r", 1, task.model, "m", "vllm", engine_args=("--chat-template", "{{ given }}" * 1000))
    assert tokenizer_files.find(own)["chat_template.jinja"].startswith(b"{{ given }}")


def test_pci_addresses_are_the_kernels() -> None:
    assert pci_address("00000000:3B:00.0") == "0000:3b:00.0"
