"""A Generate stream straight from an engine: its OpenAI events as the messages that a node agent would send.

grpc.aio takes longer to read a message from an agent than it takes to make one from events here, and what has
arrived together leaves together, as one message (ADR 37).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.api.inference.v1 import inference_pb2
from stoker.common.http1 import Exchange
from stoker.openai import body as openai_body
from stoker.openai.generation import Generation
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import Decided
from stoker.router.http.engines import Engines
from stoker.router.http.reading import ROUTES
from stoker.router.prompts.sent import SendTokens, Sent

_STARTED = inference_pb2.GenerateResponse(started=inference_pb2.Started()).SerializeToString()
_encode = msgspec.json.Encoder().encode


class EngineCall:
    """One generation. `read` gives its messages in turn: Started, Deltas, Finished."""

    def __init__(
        self,
        engines: Engines,
        decided: Decided,
        request: inference_pb2.GenerateRequest,
        read: Mapping[str, Any],
        headers: Mapping[str, str],
        seconds: float,
        limits: LimitsConfig,
        send_tokens: SendTokens,
    ) -> None:
        """It ends after `seconds` at the latest. `read` is what its prompt was made of, where that is a chat.

        The plan's pool has the bounds: its target may have left it since.

        Raises InvalidRequest for what no engine takes.
        """
        plan, target = decided.plan, decided.target
        path, body = openai_body.build(
            request,
            request.model,
            max_model_len=plan.pool.max_model_len,
            max_output=plan.pool.max_output_tokens,
            read=read,
        )
        self._engines = engines
        self._target = target
        self._sent = Sent(_encode(body), ROUTES[path], body, plan, send_tokens)
        self._headers = {"Content-Type": "application/json", "X-Request-Id": request.request_id, **headers}
        self._patience_s = limits.idle_s
        self._loop = asyncio.get_running_loop()
        self._said = Generation(target.url + path, self._loop.time() + seconds)
        self._messages: deque[bytes] = deque()
        self._finished = False
        self._watch = self._loop.call_later(limits.idle_s, self._look)

    async def read(self) -> bytes | None:
        """The next message, None after the last. Raises StokerError as a node agent would."""
        self._said.given_at = None
        message = await self._next()
        self._said.given_at = self._loop.time()
        return message

    async def _next(self) -> bytes | None:
        if not self._said.begun:
            await self._said.begin(self._begin())
            return _STARTED  # goes out while the engine works
        if not self._messages and not self._finished:
            for delta in await self._said.deltas():
                self._messages.append(inference_pb2.GenerateResponse(delta=delta).SerializeToString())
            if self._said.done:
                self._finished = True
                finished = inference_pb2.Finished(usage=self._said.usage)
                self._messages.append(inference_pb2.GenerateResponse(finished=finished).SerializeToString())
        return self._messages.popleft() if self._messages else None

    async def _begin(self) -> Exchange:
        body = await self._sent.to(self._target)
        return await self._engines.begin("POST", self._said.url, body, self._headers)

    def cancel(self) -> None:
        """End it: the engine's connection closes, unless its response has ended."""
        self._watch.cancel()
        self._said.close()

    async def end(self) -> None:
        """Read to the end of the response: only then can its connection serve the next call."""
        self._watch.cancel()
        await self._said.end()

    def _look(self) -> None:
        """Let the engine go where the reader stands still."""
        self._said.let_go_of_slow(self._patience_s)
        since = self._said.given_at
        waited_s = 0.0 if since is None else self._loop.time() - since
        if waited_s < self._patience_s:
            self._watch = self._loop.call_later(self._patience_s - waited_s, self._look)
