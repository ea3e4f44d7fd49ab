"""A router that cannot start leaves nothing behind, whichever part it was."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.common.config import load
from stoker.common.errors import StokerError
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.workers.siblings import Siblings
from tests.support.waiting import eventually

PORTS = ("grpc", "http", "ext_authz", "ext_proc", "pick")


@contextlib.contextmanager
def _listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def _free() -> int:
    with _listening() as port:
        return port


async def _nothing_runs() -> None:
    """No task but the test's, and none of a router's threads."""
    test = asyncio.current_task()

    def left() -> list[str]:
        threads = [thread.name for thread in threading.enumerate()]
        return [
            *(task.get_name() for task in asyncio.all_tasks() if task not in (test, asyncio.current_task())),
            *(name for name in threads if name.startswith(("recorder", "tokenize"))),
        ]

    await eventually(lambda: not left(), "nothing runs")


def _app(folder: Path, ports: dict[str, int], siblings: Siblings) -> RouterApp:
    settings = [f"listen.{name}=127.0.0.1:{port}" for name, port in ports.items()]
    return RouterApp(load(RouterConfig, None, [*settings, f"record.path={folder / 'record'}"]), siblings)


@pytest.mark.parametrize("taken", PORTS)
async def test_a_taken_port_undoes_what_had_started(taken: str, tmp_path: Path) -> None:
    ports = {name: _free() for name in PORTS}
    with _listening() as busy:
        app = _app(tmp_path, {**ports, taken: busy}, Siblings.alone())
        with pytest.raises(StokerError, match=f"{busy}") as refused:
            await app.start()
        assert refused.value.reason == "ADDRESS_IN_USE"
        await app.close()  # what is not running closes, too
    await _nothing_runs()
    # The same ports again: none is held.
    again = _app(tmp_path, ports, Siblings.alone())
    await again.start()
    await again.close()
    await _nothing_runs()


async def test_so_do_siblings_that_cannot_talk(tmp_path: Path) -> None:
    ports = {name: _free() for name in PORTS}
    with pytest.raises(OSError):
        await _app(tmp_path, ports, Siblings(tmp_path / "gone", 0, 2)).start()
    await _nothing_runs()
    again = _app(tmp_path, ports, Siblings.alone())
    await again.start()
    await again.close()
