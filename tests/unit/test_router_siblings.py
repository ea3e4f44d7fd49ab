"""What the workers of a router tell each other, over real sockets in a folder of the test's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker.router.workers.siblings import Siblings
from tests.support.waiting import eventually


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Siblings, Siblings, list[bytes], list[bytes]]]:
    one, other = Siblings(folder, 0, 2), Siblings(folder, 1, 2)
    heard: tuple[list[bytes], list[bytes]] = [], []
    one.hears("x", heard[0].append)
    other.hears("x", heard[1].append)
    await one.start()
    await other.start()
    try:
        yield one, other, *heard
    finally:
        await one.close()
        await other.close()


async def test_what_is_anothers_goes_to_it_and_what_is_ones_own_does_not(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, heard_by_one, heard_by_other):
        one.pass_on(other.nonce().hex(), "x", b"yours")
        one.pass_on(one.nonce().hex(), "x", b"mine")
        one.tell_all("x", b"all")
        await eventually(lambda: heard_by_other == [b"yours", b"all"], "the other hears")
        assert heard_by_one == []


@pytest.mark.parametrize("name", ["", "z", "zz", "ff00", "02", "é0"])
async def test_names_that_nobody_gave_go_nowhere(tmp_path: Path, name: str) -> None:
    async with two(tmp_path) as (one, other, _, heard):
        one.pass_on(name, "x", b"lost")
        one.pass_on(other.nonce().hex(), "x", b"last")
        await eventually(lambda: heard == [b"last"], "the other hears")


async def test_what_cannot_be_read_costs_nothing_but_itself(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, _, heard):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "1.sock")
        writer.write(b"\0\0\0\4nope")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        one.pass_on(other.nonce().hex(), "nobody listens to this", b"?")
        one.pass_on(other.nonce().hex(), "x", b"still here")
        await eventually(lambda: heard == [b"still here"], "the other hears")


async def test_one_that_returns_hears_what_was_kept_for_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, _, heard):
        one.tell_all("x", b"first")
        await eventually(lambda: heard == [b"first"], "the other hears")
        await other.close()
        again = Siblings(tmp_path, 1, 2)
        said: list[bytes] = []
        again.hears("x", said.append)
        await again.start()
        try:

            async def told() -> bool:
                one.tell_all("x", b"again")  # the first may go into a connection that has just died
                return bool(said)

            await eventually(told, "the new one hears", 10)
        finally:
            await again.close()


async def test_what_waits_is_bounded(tmp_path: Path) -> None:
    one = Siblings(tmp_path, 0, 2)
    for _ in range(20_000):
        one.tell_all("x", b"")
    assert len(one._waiting[1]) == 10_000


async def test_what_waits_is_bounded_in_bytes(tmp_path: Path) -> None:
    one = Siblings(tmp_path, 0, 2)
    for _ in range(100):
        one.tell_all("x", bytes(400_000))
        one.tell_all("x", bytes(4_000_000))
    waits = [len(said) for _, said in one._waiting[1]]
    assert sum(waits) <= 16 * 1024 * 1024
    assert set(waits) == {400_000}, "what is too long for the way is not kept"


async def test_what_is_too_long_costs_nothing_but_itself(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other, _, heard):
        one.tell_all("x", b"first")
        one.pass_on(other.nonce().hex(), "x", bytes(2_000_000))
        one.tell_all("x", b"last")
        await eventually(lambda: heard == [b"first", b"last"], "the other hears")


async def test_alone_there_is_nobody_to_tell() -> None:
    alone = Siblings.alone()
    await alone.start()
    name = alone.nonce().hex()
    assert len(name) == 24
    alone.pass_on(name, "x", b"")
    alone.tell_all("x", b"")
    await alone.close()
