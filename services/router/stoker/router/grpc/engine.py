"""A Generate stream straight from an engine: its OpenAI events as the messages that a node agent would send.

grpc.aio takes longer to read a message from an agent than it takes to make one from events here, and what has
arrived together leaves together, as one message (ADR 37).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping

import msgspec

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import DeadlineExceeded, Unavailable
from stoker.common.http1 import Broken, Exchange
from stoker.openai import body as openai_body
from stoker.openai.stream import EventStream, SlowReader, refusal
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import Decided
from stoker.router.http.engines import Engines
from stoker.router.http.reading import ROUTES
from stoker.router.prompts.sent import SendTokens, Sent

_MOST_ERROR_BYTES = 1 << 20
# An engine that has said it is done ends its response at once; one that does not loses its connection.
_END_S = 0.1
_STARTED = inference_pb2.GenerateResponse(started=inference_pb2.Started()).SerializeToString()
_encode = msgspec.json.Encoder().encode


class EngineCall:
    """One generation. `read` gives its messages in turn: Started, Deltas, Finished."""

    def __init__(
        self,
        engines: Engines,
        decided: Decided,
        request: inference_pb2.GenerateRequest,
        headers: Mapping[str, str],
        seconds: float,
        limits: LimitsConfig,
        send_tokens: SendTokens,
    ) -> None:
        """It ends after `seconds` at the latest. The plan's pool has the bounds: its target may have left it since.

        Raises InvalidRequest for what no engine takes.
        """
        plan, target = decided.plan, decided.target
        path, body = openai_body.build(
            request,
            request.model,
            max_model_len=plan.pool.max_model_len,
            max_output=plan.pool.max_output_tokens,
        )
        self._engines = engines
        self._url = target.url + path
        self._target = target
        self._sent = Sent(_encode(body), ROUTES[path], body, plan, send_tokens)
        self._headers = {"Content-Type": "application/json", "X-Request-Id": request.request_id, **headers}
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + seconds
        self._exchange: Exchange | None = None
        self._events = EventStream()
        self._messages: deque[bytes] = deque()
        self._answered = self._finished = False
        self._given_at: float | None = None
        self._slow = False
        self._watch = self._loop.call_later(limits.idle_s, self._look)

    async def read(self) -> bytes | None:
        """The next message, None after the last. Raises StokerError as a node agent would."""
        self._given_at = None
        if self._slow:
            raise SlowReader(f"the reader stood still for {self._limits.idle_s:g} s; the generation was aborted")
        try:
            message = await self._next()
        except TimeoutError as error:
            if self._loop.time() < self._ends:
                raise  # not ours
            raise DeadlineExceeded(f"the deadline passed while {self._url} generated") from error
        except Broken as error:
            when = "after its first output" if self._events.emitted else "before any output"
            raise Unavailable(
                f"the engine went away {when}: {error}",
                reason="ENGINE_DIED",
                metadata={"emitted": str(self._events.emitted).lower()},
            ) from error
        self._given_at = self._loop.time()
        return message

    async def _next(self) -> bytes | None:
        if self._messages:
            return self._messages.popleft()
        if self._finished:
            return None
        async with asyncio.timeout_at(self._ends):
            if self._exchange is None:
                body = await self._sent.to(self._target)
                self._exchange = await self._engines.begin("POST", self._url, body, self._headers)
                return _STARTED  # goes out while the engine works
            if not self._answered:
                await self._exchange.head()
                self._answered = True
                if self._exchange.status != 200:
                    raise refusal(self._exchange.status, await self._exchange.read(_MOST_ERROR_BYTES))
            while not self._messages:
                await self._take(self._exchange)
        return self._messages.popleft()

    async def _take(self, exchange: Exchange) -> None:
        data = await exchange.readany()
        if not data:
            raise Broken("the stream ended before its end")
        for delta in self._events.feed(data):
            self._messages.append(inference_pb2.GenerateResponse(delta=delta).SerializeToString())
        if self._events.done:
            self._finished = True
            finished = inference_pb2.Finished(usage=self._events.usage)
            self._messages.append(inference_pb2.GenerateResponse(finished=finished).SerializeToString())

    def cancel(self) -> None:
        """End it: the engine's connection closes, unless its response has ended."""
        self._watch.cancel()
        if self._exchange is not None:
            self._exchange.close()

    async def end(self) -> None:
        """Read to the end of the response: only then can its connection serve the next call."""
        try:
            with contextlib.suppress(TimeoutError, Broken):
                async with asyncio.timeout(_END_S):
                    while self._exchange is not None and await self._exchange.readany():
                        pass
        finally:
            self.cancel()

    def _look(self) -> None:
        """Let the engine go where the reader stands still."""
        now, patience = self._loop.time(), self._limits.idle_s
        since = self._given_at
        if since is not None and now - since >= patience:
            self._slow = True
            self.cancel()
            return
        self._watch = self._loop.call_later(patience if since is None else since + patience - now, self._look)
