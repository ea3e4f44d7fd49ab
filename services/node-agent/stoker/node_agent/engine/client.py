"""Talks HTTP to one running engine: health, constants, load, tokens. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp

from stoker.common.errors import InvalidRequest, StokerError, Unavailable
from stoker.node_agent.engine import metrics
from stoker.node_agent.engine.protocol import EngineInfo, EngineLoad, Health

_Read = TypeVar("_Read")

_MAX_BODY = 16 << 20
"""Bytes of an answer that is read at most: a bigger one is a fault, not a bigger buffer."""


class EngineUnreachable(Unavailable):
    """The engine does not answer in time, or does not speak the protocol."""

    reason = "ENGINE_UNREACHABLE"


class EngineClient:
    """One engine's HTTP server. Shares the caller's session and closes nothing."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, timeout_s: float = 5.0) -> None:
        self._session = session
        self.base_url = base_url
        self._timeout_s = timeout_s

    async def health(self, timeout_s: float | None = None) -> Health:
        """What `/health` says. Never raises."""
        try:
            async with self._session.get(f"{self.base_url}/health", timeout=self._timeout(timeout_s)) as response:
                return Health.SERVING if response.status == 200 else Health.UNHEALTHY
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Health.UNREACHABLE

    async def info(self) -> EngineInfo:
        """Constants of the engine, from `/v1/models`, `/metrics` and `/version`."""
        cache = metrics.cache_config(metrics.parse((await self._call("GET", "/metrics")).decode("utf-8", "replace")))
        version = await self._ask("GET", "/version", None, lambda answer: answer.get("version"))
        base, *others = await self._ask("GET", "/v1/models", None, _models)
        return EngineInfo(
            model=base["id"],
            max_model_len=base.get("max_model_len"),
            block_size=cache.block_size,
            kv_blocks=cache.blocks,
            cache_dtype=cache.dtype,
            prefix_caching=cache.prefix_caching,
            version=version,
            lora_adapters=tuple(model["id"] for model in others),
        )

    async def load(self, timeout_s: float | None = None) -> EngineLoad:
        """One scrape of `/metrics`."""
        return (await self.loads(timeout_s))[0]

    async def loads(self, timeout_s: float | None = None, ranks: int = 0) -> list[EngineLoad]:
        """One scrape of `/metrics`: the load of all together, then that of each of so many data-parallel ranks."""
        text = await self._call("GET", "/metrics", timeout_s=timeout_s)
        samples = metrics.parse(text.decode("utf-8", "replace"))
        return [metrics.load(samples), *(metrics.load(samples.of_rank(rank)) for rank in range(ranks))]

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a completion prompt, as the engine itself would see it."""
        return await self._tokens({"prompt": prompt, "add_special_tokens": add_special_tokens})

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> list[int]:
        """Token ids of a chat prompt, rendered by the engine's template.

        `fields` are those of the tokenize request: `add_generation_prompt`, `chat_template_kwargs` …
        """
        body: dict[str, Any] = {"messages": list(messages), **fields}
        if tools:
            body["tools"] = list(tools)
        return await self._tokens(body)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        return await self._ask("POST", "/detokenize", {"tokens": list(tokens)}, lambda answer: str(answer["prompt"]))

    async def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        return await self._ask("POST", "/tokenize", body, lambda answer: [int(token) for token in answer["tokens"]])

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], _Read]
    ) -> _Read:
        """A JSON answer as `read` sees it. What cannot be read was not said by an engine."""
        content = await self._call(method, path, body)
        try:
            return read(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineUnreachable(f"{self.base_url}{path} does not answer as an engine does: {error!r}") from error

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        url = f"{self.base_url}{path}"
        try:
            async with self._session.request(method, url, json=body, timeout=self._timeout(timeout_s)) as response:
                content = await response.content.read(_MAX_BODY)
                while len(content) < _MAX_BODY and (more := await response.content.read(_MAX_BODY - len(content))):
                    content += more
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"{method} {url}: {error!r}") from error
        if status == 200:
            return content
        raise _refusal(f"{method} {url}", status, content)

    def _timeout(self, timeout_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)


def _models(answer: Any) -> list[dict[str, Any]]:
    """The base model first, then its adapters. Raises if there is none."""
    models = list(answer["data"])
    if not models or not all(isinstance(model["id"], str) for model in models):
        raise ValueError("no models")
    return models


def _refusal(call: str, status: int, content: bytes) -> StokerError:
    text = content[:500].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(content)["error"]["message"]
    message = f"{call} answered {status}: {text}"
    return InvalidRequest(message) if 400 <= status < 500 else EngineUnreachable(message)
