"""Pick over HTTP: its RPCs by the Connect protocol, and `POST /pick` and `POST /picks` for who has no protos.

`/pick` takes the OpenAI body that will be sent, `/picks` a list of `Told`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stoker.common.errors import InvalidRequest, NotFound, StokerError
from stoker.common.headers import POLICY
from stoker.router import metrics
from stoker.router.config import LimitsConfig
from stoker.router.flights.routing import Router
from stoker.router.http.errors import MethodNotAllowed
from stoker.router.http.port import Answer, Ask, refusal
from stoker.router.http.reading import internal_error, request_id_of, seconds_allowed
from stoker.router.picking.calls import PickCalls
from stoker.router.picking.connect import PREFIX, ConnectCalls
from stoker.router.picking.connect import refusal as connect_refusal
from stoker.router.picking.picker import Picked
from stoker.router.picking.picks import API, MOST_REPORTS, Event
from stoker.router.prompts.decode import SMALL, decode
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, Asked, read

WAIT_HEADER = "x-stoker-max-wait"
_JSON = {"content-type": "application/json"}


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
_told = msgspec.json.Decoder(list[Told])


class PickRoutes:
    """Answers the port of `listen.pick`."""

    def __init__(self, router: Router, calls: PickCalls, limits: LimitsConfig) -> None:
        self._router = router
        self._picker = calls.picker
        self._limits = limits
        self._connect = ConnectCalls(calls)

    def answer(self, ask: Ask) -> Answer | Coroutine[Any, Any, Answer]:
        """One request: the answer, where nothing has to be waited for. Never raises, nor does what is to be awaited,
        but for being cancelled.
        """
        if ask.target.startswith(PREFIX):
            return self._connect.answer(ask)
        try:
            return self._answered(ask)
        except Exception as error:  # noqa: BLE001 - one bad request must not cost the process
            return _failed(ask, error)

    def _answered(self, ask: Ask) -> Answer | Coroutine[Any, Any, Answer]:
        path = ask.target.partition("?")[0]
        if path not in ("/pick", "/picks"):
            raise NotFound(
                f"{path} is not served here; these are: POST /pick, /picks, {PREFIX}Pick, {PREFIX}ReportPicks"
            )
        if ask.method != "POST":
            raise MethodNotAllowed(path, "POST", ask.method)
        if path == "/picks":
            return self._report(ask)
        if len(ask.body) > SMALL:
            return self._later(ask, None)
        picked = self._pick(ask, _of_openai(ask.body))
        return self._said(picked) if isinstance(picked, Picked) else self._later(ask, picked)

    def _pick(self, ask: Ask, asked: Asked) -> Picked | Coroutine[Any, Any, Picked]:
        headers = ask.headers
        return self._picker.pick(
            asked,
            self._router.tenants.caller(headers, asked.priority),
            request_id_of(headers),
            policy=headers.get(POLICY, ""),
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
        events = _events(ask.body)
        if len(events) > MOST_REPORTS:
            raise InvalidRequest(f"{len(events)} reports at once; send at most {MOST_REPORTS}")
        for told in events:
            self._picker.picks.tell(told.pick_id, told.event, told.place, fault=told.fault)
        return Answer(200, _JSON, b"{}")


def _events(body: bytes) -> list[Told]:
    try:
        return _told.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest.field("body", f"cannot be read: {error}") from error


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


def refused(target: str, error: StokerError) -> Answer:
    """What this port says of a request that cannot be read to its end."""
    return connect_refusal(error) if target.startswith(PREFIX) else refusal(error)


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
