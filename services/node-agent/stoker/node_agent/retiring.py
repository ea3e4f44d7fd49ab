"""While a replica retires: has its prompts computed on the replicas that take over, and tells when that is done."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from stoker.common.blocks import at_most
from stoker.common.errors import Code, StokerError
from stoker.common.ticket_keys import KeyFile
from stoker.common.tickets import HEADER, Ticket
from stoker.common.tls import Tls
from stoker.node_agent import telemetry
from stoker.node_agent.core.prompts import Prompt, PromptOf
from stoker.node_agent.core.task import Prefix, Retirement

log = structlog.get_logger(__name__)

WARMING = "x-stoker-warming"
"""Metadata that marks a request whose answer nobody reads: an agent lets it in only where there is time for it."""

_PASS_S = 60.0
_THIS_ONE = (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
"""What a successor refuses so is wrong with the prompt: the next one may do."""


class Successor(Protocol):
    """Computes prompts on another replica."""

    async def compute(self, prompt: Prompt, timeout_s: float) -> common_pb2.Usage:
        """The usage of a request for one token. Raises StokerError: RESOURCE_EXHAUSTED where it has enough to do."""
        ...


class RemoteSuccessor:
    """A replica behind its node's agent."""

    def __init__(self, channel: grpc.aio.Channel, replica_id: str, model: str, keys: KeyFile) -> None:
        """`model` is asked for where a prompt needs no adapter; `keys` sign, where tickets are in use."""
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._replica_id = replica_id
        self._model = model
        self._keys = keys

    async def compute(self, prompt: Prompt, timeout_s: float) -> common_pb2.Usage:
        """The usage of a request for one token."""
        request = inference_pb2.GenerateRequest(
            model=prompt.adapter or self._model,
            token_ids=inference_pb2.TokenIds(ids=prompt.tokens),
            sampling=inference_pb2.Sampling(max_tokens=1, temperature=0.0),
            replica_id=self._replica_id,
            request_id=f"warm-{secrets.token_hex(8)}",
        )
        metadata = [(WARMING, "1")]
        if self._keys.keys is not None:
            ticket = Ticket(secrets.token_bytes(12), time.time() + _PASS_S)
            metadata.append((HEADER, self._keys.keys.sign(ticket)))
        usage = common_pb2.Usage()
        try:
            async for response in self._stub.Generate(request, timeout=timeout_s, metadata=metadata):
                if response.HasField("finished"):
                    usage = response.finished.usage
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from(error) from error
        return usage


@dataclass
class Budget:
    """Tokens that may still be computed on others for one retirement, and those that were."""

    left: int
    spent: int = 0

    def pay(self, tokens: int) -> None:
        """So many were computed."""
        self.left -= tokens
        self.spent += tokens


class Warming:
    """One retirement as it goes on: one prompt at a time on each successor, all successors at once."""

    def __init__(
        self,
        retirement: Retirement,
        prompt_of: PromptOf,
        longest: int,
        block_size: int,
        busy_pause_s: float,
    ) -> None:
        """No prompt is asked for that is longer than `longest`. Blocks have `block_size` tokens."""
        self.budget = Budget(at_most(sum(prefix.tokens for prefix in retirement.prefixes), block_size))
        self._retirement = retirement
        self._prompt_of = prompt_of
        self._longest = longest
        self._busy_pause_s = busy_pause_s
        self._open = len(retirement.prefixes)

    async def run(self, successor: Callable[[str], Successor]) -> None:
        """All that can be done in time; never raises but when cancelled."""
        by_heir: dict[str, list[Prefix]] = {}
        for prefix in self._retirement.prefixes:
            by_heir.setdefault(prefix.successor, []).append(prefix)
        try:
            async with asyncio.timeout(self._retirement.timeout_s), asyncio.TaskGroup() as group:
                for heir, prefixes in by_heir.items():
                    group.create_task(self._warm(heir, successor(heir), prefixes))
        except TimeoutError:
            pass
        finally:
            telemetry.WARMINGS.labels("late").inc(self._open)

    async def _warm(self, heir: str, successor: Successor, prefixes: Sequence[Prefix]) -> None:
        for at, prefix in enumerate(prefixes):
            try:
                result = await self._one(successor, prefix)
            except StokerError as error:
                if error.code in _THIS_ONE:
                    result = "refused"
                else:
                    log.info("retiring.successor_refuses", successor=heir, reason=error.reason, error=error.message)
                    self._count("refused", len(prefixes) - at)
                    return
            self._count(result)

    async def _one(self, successor: Successor, prefix: Prefix) -> str:
        prompt = self._prompt_of(prefix.leaf)
        if prompt is None:
            return "unknown"
        if len(prompt.tokens) > self._longest:
            prompt = Prompt(prompt.tokens[: self._longest], prompt.adapter)
        while True:
            if prefix.tokens > self.budget.left:
                return "unfunded"
            try:
                usage = await successor.compute(prompt, self._retirement.timeout_s)
            except StokerError as error:
                if error.code is not Code.RESOURCE_EXHAUSTED:
                    raise
                # Who asks it has a better claim. Meanwhile the rest waits too: it is worth less.
                await asyncio.sleep(error.retry_after_s or self._busy_pause_s)
                continue
            computed = max(0, usage.prompt_tokens - usage.cached_prompt_tokens)
            self.budget.pay(computed)
            telemetry.WARMED_TOKENS.inc(computed)
            return "computed"

    def _count(self, result: str, prefixes: int = 1) -> None:
        self._open -= prefixes
        telemetry.WARMINGS.labels(result).inc(prefixes)


class Retiring:
    """What a member does of its retirement, from when it is told until it drains or is to run on."""

    def __init__(self, tls: Tls | None, keys: KeyFile, busy_pause_s: float, changed: Callable[[], None]) -> None:
        """`changed` is called when it is done."""
        self.done = False
        self._tls = tls
        self._keys = keys
        self._busy_pause_s = busy_pause_s
        self._changed = changed
        self._asked: Retirement | None = None
        self._warming: Warming | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def warmed_tokens(self) -> int:
        """Tokens that others have computed for the present retirement, or the last one."""
        return self._warming.budget.spent if self._warming is not None else 0

    def follow(
        self,
        asked: Retirement | None,
        prompts: Callable[[], Awaitable[PromptOf]],
        model: str,
        longest: int,
        block_size: int,
    ) -> None:
        """Do what is asked now; None ends what goes on. `model` is what a prompt without an adapter asks for."""
        if asked == self._asked:
            return
        self.end()
        if asked is not None:
            self._asked = asked
            self._warming = None
            self._task = asyncio.create_task(self._run(asked, prompts, model, longest, block_size), name="retire")

    def end(self) -> None:
        """End what goes on: nothing is asked any more."""
        self._asked, self.done = None, False
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def stop(self) -> None:
        """End what goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(
        self,
        asked: Retirement,
        prompts: Callable[[], Awaitable[PromptOf]],
        model: str,
        longest: int,
        block_size: int,
    ) -> None:
        channels = {heir: rpc.channel(endpoint, self._tls) for heir, endpoint in asked.agents.items()}
        try:
            warming = self._warming = Warming(asked, await prompts(), longest, block_size, self._busy_pause_s)
            await warming.run(lambda heir: RemoteSuccessor(channels[heir], heir, model, self._keys))
        except Exception:
            # A replica that cannot warm others must leave all the same.
            log.exception("retiring.failed")
        finally:
            await asyncio.gather(*(channel.close() for channel in channels.values()))
        log.info("retiring.done", tokens=self.warmed_tokens, prefixes=len(asked.prefixes))
        self.done = True
        self._changed()
