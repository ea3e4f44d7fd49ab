"""Recording: whole, bounded, without prompts; a disk that is slow, full or missing costs records, not requests."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import select
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from stoker.router import core
from stoker.router.config import RecordConfig, RouterConfig
from stoker.router.decisions.decided import Decided
from stoker.router.decisions.recorder import Ended, Recorder, _RotatingFile
from stoker.router.decisions.records import Record, decoded
from stoker.router.workers import parent as workers
from tests.support.waiting import eventually
from tests.unit.test_router_decisions import KEYS, decided, view_of


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("stoker_router_records_total", {"result": result}) or 0.0


def ended(tenant: str = "", keys: int = len(KEYS), at: float = 12.0) -> Ended:
    view = view_of("a", "b")
    taken = decided(view, waited_s=0.5)
    request = structs.replace(taken.plan.request, tenant=tenant, keys=KEYS[:keys])
    taken = Decided(structs.replace(taken.plan, request=request), taken.decision, taken.target, taken.at, taken.since)
    replica = taken.plan.pool.fleet.replicas[taken.target.id]
    return Ended(taken, replica, core.Outcome.OK, at, 10.25, 32, 7)


def recorder(path: Path, **settings: Any) -> Recorder:
    made = Recorder(replace(RecordConfig(path=str(path)), **settings), clock=lambda: 10.0)
    made.start()
    return made


def read(path: Path) -> list[Record]:
    return list(decoded(path.read_bytes().splitlines()))


def test_a_record_says_what_was_decided_and_how_it_went_and_names_nobody(tmp_path: Path) -> None:
    path, before = tmp_path / "decisions.jsonl", time.time()
    made = recorder(path)
    for tenant in ("acme", "acme", "other", ""):
        made.tell(ended(tenant))
    assert made.close(20.0)
    records = read(path)
    one = records[0]
    assert one.block_keys() == tuple(KEYS)
    assert (one.model, one.prompt_tokens, one.block_size, one.kv_blocks) == ("tiny", 1029, 16, 300)
    assert (one.waited_s, one.ttft_s, one.took_s) == (0.5, 0.75, 2.5)
    assert (one.cached_tokens, one.generated_tokens, one.outcome) == (32, 7, "ok")
    assert (one.reason, one.candidates, one.attempt) == ("ring", 2, 1)
    assert before - 1 < one.at < time.time() + 1
    tags = [record.tenant for record in records]
    assert tags[0] == tags[1] != tags[2]
    assert tags[3] == ""
    assert b"acme" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    made = recorder(path, max_bytes=65_536, files=3)
    for number in range(400):
        made.tell(ended(at=12.0 + number))
    assert made.close(20.0)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    assert all(file.stat().st_size <= 65_536 for file in files)
    took = [record.took_s for file in reversed(files) for record in read(file)]
    assert took == [2.5 + number for number in range(400)][-len(took) :], "the last ones are whole and in order"
    assert len(took) > 100


def test_a_full_disk_costs_records_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    before = counted("write_failed")
    made = recorder(Path("/dev/full"))
    for _ in range(10):
        made.tell(ended())
    assert made.close(20.0)
    assert counted("write_failed") - before == 10


def test_of_a_write_that_fails_halfway_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    write, failing = os.write, [False]

    def halfway(fd: int, data: bytes) -> int:
        if failing[0]:
            write(fd, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("stoker.router.decisions.recorder.os.write", halfway)
    monkeypatch.setattr("stoker.router.decisions.recorder._RETRY_S", (0.0, 0.0))
    written = _RotatingFile(path, 1 << 20, 2)
    written.write([b'{"one": 1}\n'])
    failing[0] = True
    with pytest.raises(OSError, match="No space"):
        written.write([b'{"two": 2}\n', b'{"three": 3}\n'])
    failing[0] = False
    written.write([b'{"four": 4}\n'])
    written.close()
    assert path.read_bytes() == b'{"one": 1}\n{"four": 4}\n'


def test_a_single_file_starts_anew(tmp_path: Path) -> None:
    written = _RotatingFile(tmp_path / "d", 100, 1)
    for number in range(10):
        written.write([b"%030d\n" % number])
    written.close()
    assert (tmp_path / "d").read_bytes() == b"%030d\n" % 9
    assert [file.name for file in tmp_path.iterdir()] == ["d"]


def test_what_cannot_be_encoded_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    made = recorder(path)
    odd = ended()
    odd.replica = "nobody"  # type: ignore[assignment]
    made.tell(odd)
    made.tell(ended())
    assert made.close(20.0)
    assert len(read(path)) == 1


async def test_a_path_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.router.decisions.recorder._RETRY_S", (0.05, 0.1))
    folder = tmp_path / "later"
    failed, written = counted("write_failed"), counted("written")
    made = recorder(folder / "d.jsonl")
    made.tell(ended())
    await eventually(lambda: counted("write_failed") > failed, "it cannot be written")
    folder.mkdir()

    def recorded() -> bool:
        made.tell(ended())
        return counted("written") > written

    await eventually(recorded, "written once it can be")
    assert made.close(20.0)
    assert read(folder / "d.jsonl")


async def test_a_disk_that_hangs_blocks_nobody_and_what_waits_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # to open it for reading and writing does not wait, but a full pipe does
    held = os.open(path, os.O_RDWR)
    try:
        before = counted("queue_full")
        made = recorder(path, queue=50)
        began = time.monotonic()
        for _ in range(600):
            made.tell(ended())
            await asyncio.sleep(0)
        assert time.monotonic() - began < 10
        assert counted("queue_full") - before >= 400
        assert not made.close(0.2), "and the end does not wait for it either"
    finally:

        def drain() -> None:
            while made._thread.is_alive():
                if select.select([held], [], [], 0.05)[0]:
                    os.read(held, 1 << 20)

        await asyncio.to_thread(drain)
        os.close(held)


def test_keys_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.router.decisions.recorder._LIMIT_BYTES", 10_000)
    before = counted("queue_full")
    made = Recorder(RecordConfig(path="/dev/null"), clock=lambda: 10.0)  # not begun: nothing is taken
    for _ in range(10):
        made.tell(ended())
    assert counted("queue_full") - before == 10 - 10_000 // (512 + 32 * len(KEYS))


def test_two_processes_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    other = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    before = counted("write_failed")
    made = recorder(path)
    made.tell(ended())
    assert made.close(20.0)
    assert counted("write_failed") - before == 1
    os.close(other)
    assert path.stat().st_size == 0


def test_a_line_that_a_kill_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"at":1.0,"mod')
    made = recorder(path)
    made.tell(ended())
    assert made.close(20.0)
    cut, whole = path.read_bytes().splitlines()
    assert cut == b'{"at":1.0,"mod'
    assert len(list(decoded([whole]))) == 1
    assert len(list(decoded([whole, cut, whole]))) == 2
    with pytest.raises(ValueError, match="line 1 is no record"):
        list(decoded([cut]))


@pytest.mark.parametrize("seed", range(3))
def test_keys_survive(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.getrandbits(64) for _ in range(rng.randrange(50))]
    record = Record(1.0, "m", "r", "ring", 1, 16, keys=b"".join(key.to_bytes(8, "little") for key in keys))
    assert record.block_keys() == tuple(keys)


def test_each_worker_of_a_router_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RouterConfig(workers=3, record=RecordConfig(path="/var/lib/stoker/d.jsonl"))
    (tmp_path / workers._CONFIG).write_bytes(msgspec.json.encode(config))
    monkeypatch.setenv(workers._NUMBER, f"2:{tmp_path}")
    assigned = workers.assigned()
    assert assigned is not None
    assert assigned[0].record.path == "/var/lib/stoker/d.jsonl.worker-2"
