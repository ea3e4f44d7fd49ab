"""What a router's parent process does about workers that end, whatever they end with."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import pytest

from stoker.common.errors import StokerError
from stoker.common.service import EXIT_STAY_DOWN
from stoker.router.workers import parent as workers


class Lives:
    """How each life of a worker goes; then the router is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: int | OSError) -> None:
        self.left = list(ends)
        self.stop = asyncio.Event()
        monkeypatch.setattr(workers, "_run", self._run)

    async def _run(self, number: int, folder: Path, stops_s: float, stop: asyncio.Event) -> int:
        end = self.left.pop(0)
        if not self.left:
            stop.set()
        if isinstance(end, OSError):
            raise end
        return end

    async def kept(self) -> None:
        async with asyncio.timeout(30):
            await workers._keep(0, Path(), 1.0, self.stop)


async def test_what_no_worker_can_run_with_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StokerError) as refused:
        await Lives(monkeypatch, EXIT_STAY_DOWN, 0).kept()
    assert refused.value.reason == "BAD_CONFIG"


async def test_what_a_later_life_cannot_run_with_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such as a file of keys that is just being written.
    lives = Lives(monkeypatch, -9, EXIT_STAY_DOWN, 0)
    await lives.kept()
    assert not lives.left


class Line:
    """What a parent reads at each look: beats, or nothing; then nothing for ever."""

    def __init__(self, *looks: int) -> None:
        self.looks = list(looks)
        self.looked = 0

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def recv(self, size: int) -> bytes:
        if self.looks and self.looks[0]:
            self.looks[0] -= 1
            return b"."
        self.looked += 1
        if self.looks:
            self.looks.pop(0)
        raise BlockingIOError


@pytest.mark.parametrize(
    ("looks", "found_at"),
    [
        ((), 9),  # it never began
        ((0, 0, 0, 0, 1), 5 + 3),  # a first word may take longer
        ((1, 0, 0, 2, 0, 0, 1), 7 + 3),  # never three in a row
        ((1, 0, 0, 0), 4),
    ],
)
async def test_a_worker_is_silent_after_so_many_looks(looks: tuple[int, ...], found_at: int) -> None:
    line = Line(*looks)
    async with asyncio.timeout(10):
        await workers.silent(cast(socket.socket, line), look_s=0, looks=3, starting=9)
    assert line.looked == found_at


async def test_a_worker_that_has_gone_is_silent() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.send(b".")
        theirs.close()
        async with asyncio.timeout(10):
            await workers.silent(ours, look_s=0, looks=3, starting=1000)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(monkeypatch, OSError(12, "Cannot allocate memory"), OSError(11, "try again"), 0)
    await lives.kept()
    assert not lives.left
