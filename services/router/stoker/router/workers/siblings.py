"""What the workers of one router tell each other: what one of them holds, and another got the word about.

The kernel gives each connection to one worker. So Envoy's access log, a report on a pick, or a question about a
stored response may reach a worker that knows nothing of it. Names carry the number of the worker that gave them, and
what is not its own a worker passes on, over Unix sockets in a folder of theirs. Nothing is repeated: what is lost
costs what it would cost if its sender had gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

log = structlog.get_logger(__name__)

_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 16 << 20
_MOST_BYTES = 1 << 20
_LONGEST_BYTES = _MOST_BYTES // 2 - 1024
_MESSAGE_BYTES = 64  # of a message beside what it says
_RETRY_S = 0.2

Message = tuple[str, bytes]
"""What it is about, and what is said."""

_decode = msgspec.msgpack.Decoder(list[Message]).decode
_encode = msgspec.msgpack.Encoder().encode


class _Waiting:
    """What one sibling is still to be told; the oldest goes where there is too much."""

    def __init__(self) -> None:
        self.something = asyncio.Event()
        self._messages: deque[Message] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def add(self, message: Message) -> None:
        size = _size(message)
        if size > _LONGEST_BYTES:
            return
        self._messages.append(message)
        self._bytes += size
        while len(self) > _MOST_WAITING or self._bytes > _MOST_WAITING_BYTES:
            self._take()
        self.something.set()

    def batch(self) -> list[Message]:
        """What goes next."""
        batch, size = [], 0
        while self._messages and size < _MOST_BYTES // 2:
            batch.append(self._take())
            size += _size(batch[-1])
        return batch

    def _take(self) -> Message:
        message = self._messages.popleft()
        self._bytes -= _size(message)
        return message


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message[1])


class Siblings:
    """One worker's word to and from the others; `alone()` has none."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        """`number` of `count`, from 0. Their sockets lie in `folder`, which is nobody else's."""
        self.number = number
        self.count = count
        self._folder = folder
        self._heard: dict[str, Callable[[bytes], None]] = {}
        self._waiting = {other: _Waiting() for other in range(count) if other != number}
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.StreamWriter] = set()

    @classmethod
    def alone(cls) -> Siblings:
        """Of a router that is one process."""
        return cls(Path(), 0, 1)

    def nonce(self) -> bytes:
        """12 bytes that nobody can guess, whose hex names something that this worker holds."""
        if self.count == 1:
            return secrets.token_bytes(12)
        return bytes([self.number]) + secrets.token_bytes(11)

    def hears(self, about: str, heard: Callable[[bytes], None]) -> None:
        """Call `heard` with what siblings say about something."""
        self._heard[about] = heard

    def pass_on(self, name: str, about: str, said: bytes) -> None:
        """Tell the worker that gave a name, if that is another."""
        if not self._waiting:
            return
        try:
            owner = bytes.fromhex(name[:2])[0]
        except (ValueError, IndexError):
            return
        if owner in self._waiting:
            self._waiting[owner].add((about, said))

    def tell_all(self, about: str, said: bytes) -> None:
        """Tell every other worker."""
        for waiting in self._waiting.values():
            waiting.add((about, said))

    async def start(self) -> None:
        """Listen, and talk to those that listen."""
        if self.count == 1:
            return
        path = self._path(self.number)
        path.unlink(missing_ok=True)  # of the worker that had this number before
        self._server = await asyncio.start_unix_server(self._listen, path)
        self._tasks = [asyncio.create_task(self._talk(other), name=f"sibling {other}") for other in self._waiting]

    async def close(self) -> None:
        """Fall silent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for caller in self._callers:
            caller.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    async def _talk(self, other: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(self._path(other))
                try:
                    await self._say_all(self._waiting[other], writer)
                finally:
                    writer.close()
            await asyncio.sleep(_RETRY_S)

    async def _say_all(self, waiting: _Waiting, writer: asyncio.StreamWriter) -> None:
        while True:
            while batch := waiting.batch():
                packed = _encode(batch)
                writer.write(len(packed).to_bytes(4, "big") + packed)
                await writer.drain()
            waiting.something.clear()
            await waiting.something.wait()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if size > _MOST_BYTES:
                    break
                for about, said in _decode(await reader.readexactly(size)):
                    heard = self._heard.get(about)
                    if heard is not None:
                        heard(said)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # streams log a task that ends cancelled as if it had failed
        except Exception as error:
            log.error("siblings.unreadable", exc_info=error)
        finally:
            self._callers.discard(writer)
            writer.close()
