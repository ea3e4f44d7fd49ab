"""The parity probe: do this router and an engine turn the same prompt into the same tokens?

Canaries go through the router's own reading and through the engine's /tokenize. Where they differ, every key
this router computes is wrong, and prefix routing for that replica would be noise: it is refused, loudly.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import structlog

from stoker.common.backoff import Backoff
from stoker.common.errors import StokerError
from stoker.router import metrics
from stoker.router.fleet.pools import OK, PENDING, Target
from stoker.router.fleet.view import View
from stoker.router.http.engines import EngineFailed, Engines
from stoker.router.prompts.plan import tokens_of
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, Asked, read
from stoker.router.prompts.render import NotRendered
from stoker.router.prompts.tokenizer_store import TokenizerStore

log = structlog.get_logger(__name__)

_PROBE_S = 10.0
_BACKOFF = Backoff(first_s=0.5, max_s=30.0)
_NO_CHAT = (400, 404, 501)

_TEXT = "The stoker feeds the fire.\n\tFünf  Öfen, ½ tonne: 火 🔥 <|x|> </s> 1234567 don't\r\n"
_MESSAGES = [
    {"role": "system", "content": "You are a stoker. <b>Be brief & kind.</b>"},
    {"role": "user", "content": [{"type": "text", "text": "How hot is it?"}, {"type": "text", "text": "In °C."}]},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_gauge",
            "description": "Reads a gauge's value — “now”",
            "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        },
    }
]
_CALLED = [
    *_MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read_gauge", "arguments": '{"id": 7}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "451"},
]
CANARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": _TEXT}),
    "chat": (CHAT, {"messages": _MESSAGES, "add_generation_prompt": True}),
    "chat with tools": (CHAT, {"messages": _CALLED, "tools": _TOOLS, "add_generation_prompt": True}),
}
_GAUGE = {OK: 1, PENDING: 0}


_Life = tuple[Target, int, str, str]


def _life(target: Target) -> _Life:
    """What a verdict holds for."""
    engine = target.record.engine
    return target, target.record.epoch, engine.http_url, engine.tokenizer_sha256


class ParityProbe:
    """Probes each new life of a replica until there is a verdict."""

    def __init__(
        self,
        view: View,
        engines: Engines,
        tokenizers: TokenizerStore,
        rng: random.Random,
        *,
        chat_tokens: bool = False,
    ) -> None:
        """`chat_tokens`: find out too which engines take the tokens of chats."""
        self._view = view
        self._engines = engines
        self._tokenizers = tokenizers
        self._rng = rng
        self._chat_tokens = chat_tokens
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probed: dict[str, _Life] = {}

    def sync(self) -> None:
        """Probe what is ready and not probed yet in this epoch; forget what is gone."""
        for gone in self._probed.keys() - self._view.targets.keys():
            del self._probed[gone]
            self._tasks.pop(gone).cancel()
            metrics.PARITY.remove(gone)
        for target in self._view.targets.values():
            life, old = _life(target), self._tasks.get(target.id)
            if target.pool is None or not target.ready:
                continue
            # A verdict can be void though the life is the same: an agent that adopts its engine tells it anew.
            void = target.parity == PENDING and old is not None and old.done()
            if self._probed.get(target.id) == life and not void:
                continue
            self._probed[target.id] = life
            metrics.PARITY.labels(target.id).set(0)
            if old is not None:
                old.cancel()
            self._tasks[target.id] = asyncio.create_task(self._until_known(target, life))

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _until_known(self, target: Target, life: _Life) -> None:
        attempt = 0
        while target.pool is not None and _life(target) == life:
            self._tokenizers.want(target)
            verdict = await self._probe(target)
            if verdict is not None:
                self._view.proved(target, verdict)
                metrics.PARITY.labels(target.id).set(_GAUGE.get(verdict, -1))
                log.info("parity.proved", replica=target.id, parity=verdict)
                return
            await asyncio.sleep(_BACKOFF.delay_s(attempt, self._rng))
            attempt += 1

    async def _probe(self, target: Target) -> str | None:
        """ "ok", what differs, or None while that cannot be told."""
        if self._tokenizers.get(target.record.engine.tokenizer_sha256) is None:
            return None
        try:
            async with asyncio.timeout(_PROBE_S):
                for name, (api, canary) in CANARIES.items():
                    difference = await self._compare(target, api, canary)
                    if difference:
                        return f"{name}: {difference}"
                target.takes_chat_tokens = self._chat_tokens and await self._takes_chat_tokens(target)
        except (ConnectionError, TimeoutError, StokerError, msgspec.MsgspecError) as error:
            log.info("parity.not_probed", replica=target.id, error=str(error) or type(error).__name__)
            return None
        return OK

    async def _compare(self, target: Target, api: str, canary: dict[str, Any]) -> str:
        """What differs; empty where nothing does. Raises EngineFailed."""
        body = {"model": target.record.engine.model_names[0], **canary}
        raw = msgspec.json.encode(body)
        mine = self._tokens(target, read(api, body, raw))
        answer = await self._engines.call("POST", f"{target.url}/tokenize", raw, {"Content-Type": "application/json"})
        async with answer:
            reply = await answer.read()
        if answer.status != 200:
            if mine is None and answer.status in _NO_CHAT:
                return ""  # neither can: a model without a chat template, say
            if answer.status in _NO_CHAT:
                return f"the engine refuses with HTTP {answer.status} what this router tokenizes"
            raise EngineFailed(f"/tokenize answered HTTP {answer.status}")
        theirs = msgspec.json.decode(reply)["tokens"]
        if mine is None:
            return "this router cannot render what the engine can"
        return differ(mine, theirs)

    async def _takes_chat_tokens(self, target: Target) -> bool:
        """Whether the engine looks at the tokens of a chat: then it refuses an empty list, and computes nothing.

        One that does not, answers with a token. Raises EngineFailed.
        """
        asking = {
            "model": target.record.engine.model_names[0],
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 1,
            "kv_transfer_params": {"prompt_token_ids": []},
        }
        raw, headers = msgspec.json.encode(asking), {"Content-Type": "application/json"}
        async with await self._engines.call("POST", f"{target.url}/v1/chat/completions", raw, headers) as answer:
            return b"prompt_token_ids" in await answer.read() and answer.status == 400

    def _tokens(self, target: Target, asked: Asked) -> list[int] | None:
        tokenizer = self._tokenizers.get(target.record.engine.tokenizer_sha256)
        try:
            lists = tokens_of(asked.prompt, tokenizer, 0)
        except NotRendered:
            return None
        return list(lists[0]) if lists else None


def differ(mine: list[int], theirs: list[int]) -> str:
    """Where two token lists part; empty where they are equal."""
    if mine == theirs:
        return ""
    at = next(
        (index for index, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    return f"token {at} differs (router has {len(mine)} tokens, engine {len(theirs)})"
