"""Pick over HTTP: `POST /pick` and `POST /picks`, for a third of what a gRPC call costs.

`/pick` takes the OpenAI body that will be sent (application/json), or a `Tokenized` map (application/msgpack).
`/picks` takes a list of `Told`, in either form; answers are JSON.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from stoker.common.blocks import unpack_keys
from stoker.common.errors import InvalidRequest, NotFound, StokerError
from stoker.router import metrics
from stoker.router.config import LimitsConfig
from stoker.router.flights.routing import Router
from stoker.router.http.errors import MethodNotAllowed
from stoker.router.http.port import Answer, Ask, refusal
from stoker.router.http.reading import internal_error, request_id_of, seconds_allowed
from stoker.router.picking.picker import Picked, Picker
from stoker.router.picking.picks import API, MOST_REPORTS, Event
from stoker.router.prompts.decode import SMALL, decode
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, Asked, asked_in_tokens, keyed, read, tokenized

WAIT_HEADER = "x-stoker-max-wait"
_MSGPACK = "application/msgpack"
_JSON = {"content-type": "application/json"}

T = TypeVar("T")


class Tokenized(msgspec.Struct, frozen=True):
    """A prompt whose caller tokenizes: `token_ids` (little-endian u32) or `block_keys` (little-endian u64)."""

    model: str
    token_ids: bytes = b""
    block_keys: bytes = b""
    prompt_tokens: int = 0
    block_size: int = 0
    max_tokens: int | None = None
    n: int = 1
    cache_salt: str = ""
    session_id: str = ""
    priority: int = 0


class Told(msgspec.Struct, frozen=True):
    """One event of a picked request."""

    pick_id: str
    event: Event
    place: Annotated[int, Meta(ge=0, le=255)] = 0
    fault: bool = False


class _Place(msgspec.Struct, frozen=True):
    replica_id: str
    agent_endpoint: str
    http_url: str
    rank: int | None


class _Answer(msgspec.Struct, frozen=True):
    pick_id: str
    request_id: str
    places: list[_Place]
    reason: str
    prompt_tokens: int | None
    predicted_cached_tokens: int | None
    expires_in_ms: int
    waited_ms: int
    ticket: str


_encoder = msgspec.json.Encoder()
_tokenized = msgspec.msgpack.Decoder(Tokenized)
_told = (msgspec.json.Decoder(list[Told]), msgspec.msgpack.Decoder(list[Told]))


class PickRoutes:
    """Answers the port of `listen.pick`."""

    def __init__(self, router: Router, picker: Picker, limits: LimitsConfig) -> None:
        self._router = router
        self._picker = picker
        self._limits = limits

    def answer(self, ask: Ask) -> Answer | Coroutine[Any, Any, Answer]:
        """One request: the answer, where nothing has to be waited for. Never raises, nor does what is to be awaited,
        but for being cancelled.
        """
        try:
            return self._answered(ask)
        except Exception as error:  # noqa: BLE001 - one bad request must not cost the process
            return _failed(ask, error)

    def _answered(self, ask: Ask) -> Answer | Coroutine[Any, Any, Answer]:
        path = ask.target.partition("?")[0]
        if path not in ("/pick", "/picks"):
            raise NotFound(f"{path} is not served here; these are: POST /pick, POST /picks")
        if ask.method != "POST":
            raise MethodNotAllowed(path, "POST", ask.method)
        if path == "/picks":
            return self._report(ask)
        if ask.headers.get("content-type") == _MSGPACK:
            asked = _of_tokenized(_decoded(_tokenized, ask.body))
        elif len(ask.body) <= SMALL:
            asked = _of_openai(ask.body)
        else:
            return self._later(ask, None)
        picked = self._pick(ask, asked)
        return self._said(picked) if isinstance(picked, Picked) else self._later(ask, picked)

    def _pick(self, ask: Ask, asked: Asked) -> Picked | Coroutine[Any, Any, Picked]:
        headers = ask.headers
        return self._picker.pick(
            asked,
            self._router.tenants.caller(headers, asked.priority),
            request_id_of(headers),
            policy=headers.get("x-stoker-policy", ""),
            wait_s=_wait(headers.get(WAIT_HEADER), seconds_allowed(headers, self._limits.request_s)),
            carrier=headers,
        )

    async def _later(self, ask: Ask, coming: Coroutine[Any, Any, Picked] | None) -> Answer:
        """What is large, or has to wait."""
        try:
            if coming is not None:
                return self._said(await coming)
            picked = self._pick(ask, await asyncio.to_thread(_of_openai, ask.body))
            return self._said(picked if isinstance(picked, Picked) else await picked)
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(ask, error)

    def _said(self, picked: Picked) -> Answer:
        undo = functools.partial(self._picker.picks.undo, picked.pick_id)
        return Answer(200, _JSON, _encoder.encode(_answer(picked)), undo=undo)

    def _report(self, ask: Ask) -> Answer:
        packed = ask.headers.get("content-type") == _MSGPACK
        events = _decoded(_told[packed], ask.body)
        if len(events) > MOST_REPORTS:
            raise InvalidRequest(f"{len(events)} reports at once; send at most {MOST_REPORTS}")
        for told in events:
            self._picker.picks.tell(told.pick_id, told.event, told.place, fault=told.fault)
        return Answer(200, _JSON, b"{}")


def _decoded(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest.field("body", f"cannot be read: {error}") from error


def _of_tokenized(body: Tokenized) -> Asked:
    if not body.model:
        raise InvalidRequest.field("model", "name the model to ask")
    if bool(body.token_ids) == bool(body.block_keys):
        raise InvalidRequest.field("token_ids", "give one of token_ids and block_keys")
    if min(body.prompt_tokens, body.max_tokens or 0) < 0:
        raise InvalidRequest.field("prompt_tokens", "no count is below 0")
    if body.token_ids:
        told = tokenized(body.token_ids)
    else:
        told = keyed(unpack_keys(body.block_keys), body.prompt_tokens, body.block_size)
    return asked_in_tokens(
        body.model,
        told,
        max_output_tokens=body.max_tokens,
        choices=body.n,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        priority=body.priority,
    )


def _of_openai(body: bytes) -> Asked:
    fields = decode(body)
    return read(CHAT if "messages" in fields else COMPLETIONS, fields, body)


def _wait(header: str | None, allowed_s: float) -> float:
    """Seconds that a pick may wait. Raises InvalidRequest."""
    if header is None:
        return allowed_s
    try:
        seconds = float(header)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidRequest.field(WAIT_HEADER, "must be a number of seconds, 0 or more")
    return min(seconds, allowed_s)


def _answer(picked: Picked) -> _Answer:
    return _Answer(
        pick_id=picked.pick_id,
        request_id=picked.request_id,
        places=[_Place(t.record.replica_id, t.record.agent_endpoint, t.url, t.rank) for t in picked.places],
        reason=picked.decided.decision.reason.value,
        prompt_tokens=picked.tokens,
        predicted_cached_tokens=picked.cached_tokens,
        expires_in_ms=int(1000 * picked.expires_in),
        waited_ms=int(1000 * picked.waited),
        ticket=picked.ticket,
    )


def _failed(ask: Ask, error: Exception) -> Answer:
    path = ask.target.partition("?")[0]
    if not isinstance(error, StokerError):
        error = internal_error("pick.internal_error", path, error)
    if path == "/pick":
        metrics.of(metrics.REQUESTS, API, metrics.outcome_of(error)).inc()
    return refusal(error)
