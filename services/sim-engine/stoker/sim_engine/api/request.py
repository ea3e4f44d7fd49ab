"""Reads generation requests as strictly, and as leniently, as vLLM does; errors in its words."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from stoker.sim_engine.config import SimConfig
from stoker.sim_engine.core import text
from stoker.sim_engine.core.scheduler import Request
from stoker.sim_engine.engine import Call

_ids = itertools.count(1)
_MAX_N = 16384
_MAX_LOGPROBS = 20


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param

    def response(self) -> web.Response:
        """The HTTP response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return web.json_response({"error": error}, status=self.status)


@dataclass(frozen=True)
class Sampling:
    """The fields of a request that the simulation honours."""

    model: str
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    logprobs: int | None
    """Alternatives wanted for each token; `None` for no log-probabilities."""
    salt: str | None
    priority: int
    seed: int
    token_ids: bool
    """Token ids are wanted beside the text."""


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise _invalid("json_invalid", "body", f"JSON decode error: {error}") from None
    if not isinstance(body, dict):
        raise _invalid("dict_type", "body", "Input should be a valid dictionary")
    return body


def check_model(body: Mapping[str, Any], config: SimConfig) -> str:
    """The served name asked for."""
    name = body.get("model")
    if name is None:
        return config.served_names[0]
    if name not in config.served_names:
        known = ", ".join(config.served_names)
        raise ApiError(f"The model `{name}` does not exist. Valid aliases: {known}.",
                       status=404, kind="NotFoundError", param="model")  # fmt: skip
    return str(name)


def sampling(body: Mapping[str, Any], config: SimConfig, *, chat: bool, limit_field: str = "max_tokens") -> Sampling:
    """Check and gather the common fields."""
    model = check_model(body, config)
    limit = limit_field
    if chat and body.get("max_completion_tokens") is not None:
        limit = "max_completion_tokens"
    max_tokens = _integer(body, limit, None if chat else 16)
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(
            f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})",
            param="max_tokens",
        )
    temperature = _number(body, "temperature", 1.0)
    for name in ("top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"):
        _number(body, name, 1.0)
    n = _integer(body, "n", 1) or 0
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if n > _MAX_N:
        raise ApiError(f"n must be at most {_MAX_N}, got {n}.")
    if n > 1 and temperature < 1e-5:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            param="cache_salt",
        )
    given_seed = _integer(body, "seed", None)
    greedy = temperature < 1e-5
    return Sampling(
        model=model,
        max_tokens=max_tokens,
        n=n,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        stop=_stop(body),
        logprobs=_logprobs(body, chat=chat),
        salt=salt,
        priority=_integer(body, "priority", 0) or 0,
        seed=0 if greedy else given_seed if given_seed is not None else text.mix(time.monotonic_ns()),
        token_ids=body.get("return_token_ids") is True,
    )


def new_call(
    config: SimConfig, prompts: Sequence[Sequence[int]], wanted: Sampling, script: Sequence[int] = ()
) -> Call:
    """The sequences of a call: `n` for each prompt. Raises `ApiError` for a prompt that is too long."""
    now = time.monotonic()
    requests: list[Request] = []
    for prompt in prompts:
        room = config.max_model_len - len(prompt)
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt "
                f"contains {len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                f"Please reduce the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                param="input_tokens",
            )
        for _ in range(wanted.n):
            requests.append(
                Request(
                    id=f"{next(_ids):x}",
                    prompt=tuple(prompt),
                    max_tokens=min(wanted.max_tokens or room, room, config.max_output_tokens or room),
                    arrived_s=now,
                    salt=wanted.salt,
                    priority=wanted.priority,
                    seed=text.mix(wanted.seed, len(requests)),
                    script=tuple(script),
                )
            )
    return Call(requests)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) for one in stops):
        raise _invalid("string_type", "body.stop", "Input should be a valid string")
    return tuple(one for one in stops if one)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    if chat:
        count = (_integer(body, "top_logprobs", 0) or 0) if body.get("logprobs") else None
    else:
        count = _integer(body, "logprobs", None)
    if count is not None and not 0 <= count <= _MAX_LOGPROBS:
        raise ApiError(f"logprobs must be from 0 to {_MAX_LOGPROBS}, got {count}.", param="logprobs")
    return count


def _integer(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid("int_parsing", f"body.{name}", "Input should be a valid integer")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid("float_parsing", f"body.{name}", "Input should be a valid number")
    return float(value)


def _invalid(kind: str, where: str, message: str) -> ApiError:
    detail = {"type": kind, "loc": where, "msg": message}
    return ApiError(f"1 validation error:\n  {detail}", kind="Bad Request", param=where)


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat's messages. Raises `ApiError` for what is none, by the first of the kinds that vLLM tries."""
    given = body.get("messages")
    if given is None:
        raise missing("messages")
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ApiError("messages must be an array of objects.", param="messages")
    for at, message in enumerate(given):
        kind = f"messages.{at}.ChatCompletionDeveloperMessageParam"
        if "role" not in message:
            raise missing(f"{kind}.role")
        if not isinstance(message["role"], str):
            raise _invalid("literal_error", f"body.{kind}.role", "Input should be 'developer'")
        if not isinstance(message.get("content"), str | list | None):
            raise _invalid("string_type", f"body.{kind}.content", "Input should be a valid string")
    return given


def missing(name: str) -> ApiError:
    """A required field is not there."""
    return _invalid("missing", f"body.{name}", "Field required")
