"""The client for code without an event loop: the same one, on a loop in a thread that all such clients share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from stoker.api.inference.v1 import inference_pb2
from stoker.client.aio import AsyncClient, AsyncStream
from stoker.client.prompts import Prompt
from stoker.client.results import Chunk, Generation, Served, Usage
from stoker.client.settings import ClientSettings

R = TypeVar("R")


class _Background:
    """An event loop in a daemon thread, begun on first use. One for all: gRPC does not like several."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run to the end; who is interrupted here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="stoker-client", daemon=True).start()
            return self._loop


_background = _Background()


class Stream:
    """The chunks of one request, in order. Closing it early cancels the request; the engine stops within a second."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    @property
    def served(self) -> Served | None:
        """Who serves it: known with the first chunk."""
        return self._stream.served

    @property
    def usage(self) -> Usage | None:
        """Known at the end."""
        return self._stream.usage

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk. Raises StokerError; Interrupted where some had come already."""
        chunk = _background.run(_next(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def rest(self) -> Generation:
        """All of it, once it has ended."""
        return _background.run(self._stream.rest())

    def close(self) -> None:
        """End it; harmless where it has ended."""
        _background.run(self._stream.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Picks by the routers, streams from the nodes. For any number of threads; close it, or use it as a context."""

    def __init__(self, routers: Sequence[str], settings: ClientSettings | None = None) -> None:
        """`routers`: see AsyncClient."""
        self._client = _background.run(_made(routers, settings))

    def stream(self, model: str, prompt: Prompt, *, timeout_s: float | None = None, **fields: Any) -> Stream:
        """Begin a generation; see AsyncClient.stream."""
        return Stream(
            _background.run(_begun(lambda: self._client.stream(model, prompt, timeout_s=timeout_s, **fields)))
        )

    def send(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """The same for a whole message, which can say all that Generate takes."""
        return Stream(_background.run(_begun(lambda: self._client.send(request, timeout_s=timeout_s))))

    def generate(self, model: str, prompt: Prompt, *, timeout_s: float | None = None, **fields: Any) -> Generation:
        """Generate to the end. Raises StokerError; Interrupted where some had come already."""
        return _background.run(self._client.generate(model, prompt, timeout_s=timeout_s, **fields))

    def models(self) -> list[inference_pb2.Model]:
        """The models that can be asked for. Raises StokerError."""
        return _background.run(self._client.models())

    def close(self) -> None:
        """Tell the routers what is left to tell, and disconnect; what still streams fails."""
        _background.run(self._client.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _made(routers: Sequence[str], settings: ClientSettings | None) -> AsyncClient:
    return AsyncClient(routers, settings)


async def _next(stream: AsyncStream) -> Chunk | None:
    # StopAsyncIteration cannot cross a future.
    return await anext(stream, None)


async def _begun(begin: Any) -> AsyncStream:
    stream: AsyncStream = begin()
    return stream
