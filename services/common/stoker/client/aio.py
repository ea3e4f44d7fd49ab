"""The client for asyncio."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from stoker.api.inference.v1 import inference_pb2
from stoker.client.deadline import Deadline
from stoker.client.errors import Interrupted, typed
from stoker.client.prompts import Prompt, request_of
from stoker.client.results import Chunk, Gathering, Generation, Served, Usage
from stoker.client.routers import MODELS
from stoker.client.settings import ClientSettings
from stoker.client.way import Ways
from stoker.common.errors import DeadlineExceeded, StokerError


class AsyncStream:
    """The chunks of one request, in order. Leaving it early cancels the request; the engine stops within a second."""

    def __init__(
        self, responses: AsyncGenerator[inference_pb2.GenerateResponse | Served], deadline: Deadline
    ) -> None:
        self._responses = responses
        self._deadline = deadline
        self._gathered = Gathering()
        self.served: Served | None = None
        """Who serves it: known with the first chunk."""
        self.usage: Usage | None = None
        """Known at the end."""

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises StokerError; Interrupted where some had come already."""
        try:
            async with asyncio.timeout_at(self._deadline.at):
                chunk = await self._next()
        except TimeoutError:
            await self.aclose()
            raise self._failed(
                DeadlineExceeded(
                    f"the request did not end within {self._deadline.seconds:g} s; allow more (timeout_s)"
                )
            ) from None
        except StokerError as error:
            raise self._failed(typed(error)) from error
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> Chunk | None:
        async for response in self._responses:
            if isinstance(response, Served):
                self.served = response
            elif response.HasField("delta"):
                self._gathered.add(response.delta)
                return Chunk.of(response.delta)
            elif response.HasField("finished"):
                self.usage = Usage.of(response.finished.usage)
        return None

    def _failed(self, error: StokerError) -> StokerError:
        gathered = self._gathered
        return Interrupted(error, gathered.text, gathered.token_ids) if gathered.text else error

    async def rest(self) -> Generation:
        """All of it, once it has ended."""
        async for _ in self:
            pass
        if self.served is None or self.usage is None:
            raise StokerError("the stream ended without saying so: versions that do not fit", reason="BAD_STREAM")
        return Generation(self._gathered.choices(), self.usage, self.served)

    async def aclose(self) -> None:
        """End it; harmless where it has ended."""
        await self._responses.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Picks by the routers, streams from the nodes. For one event loop; close it, or use it as a context."""

    def __init__(
        self, routers: Sequence[str], settings: ClientSettings | None = None, *, rng: random.Random | None = None
    ) -> None:
        """`routers` are host:port of their gRPC ports: another is asked where one does not answer.

        Where some are http://host:port or https://host:port, of their `listen.pick`, picks go there: these cost less.
        The others relay, and list models. Raises InvalidRequest.
        """
        self.settings = settings or ClientSettings()
        self._ways = Ways(routers, self.settings, rng or random.Random())  # noqa: S311 - whom to ask first

    def stream(self, model: str, prompt: Prompt, *, timeout_s: float | None = None, **fields: Any) -> AsyncStream:
        """Begin a generation; it is sent when the first chunk is asked for.

        `fields` are those of `prompts.request_of`: max_tokens, temperature and whatever `Sampling` has; session_id,
        cache_salt, priority, request_id, return_token_ids. Raises InvalidRequest.
        """
        return self.send(request_of(model, prompt, **fields), timeout_s=timeout_s)

    def send(self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None) -> AsyncStream:
        """The same for a whole message, which can say all that Generate takes."""
        deadline = Deadline(self.settings.timeout_s if timeout_s is None else timeout_s)
        return AsyncStream(self._ways.run(request, deadline), deadline)

    async def generate(
        self, model: str, prompt: Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> Generation:
        """Generate to the end. Raises StokerError; Interrupted where some had come already."""
        async with self.stream(model, prompt, timeout_s=timeout_s, **fields) as stream:
            return await stream.rest()

    async def models(self) -> list[inference_pb2.Model]:
        """The models that can be asked for. Raises StokerError."""
        routers = self._ways.routers
        try:
            routers.need_grpc()
            deadline = Deadline(self.settings.timeout_s)
            _, answer = await routers.ask(routers.by_grpc, MODELS, inference_pb2.ListModelsRequest(), deadline)
        except StokerError as error:
            raise typed(error) from error
        return list(answer.models)

    async def close(self) -> None:
        """Tell the routers what is left to tell, and disconnect; what still streams fails."""
        await self._ways.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
