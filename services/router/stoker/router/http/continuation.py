"""A completion or chat stream over HTTP that goes on at another replica when its own dies.

The engine is asked for token ids beside the text. On their way to the client they are taken out again, so that its
stream is the same to the byte, unless it asked for them itself. Nothing is decoded before a replica dies or much
has come.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import structlog

from stoker.common import otel
from stoker.common.errors import StokerError, Unavailable
from stoker.common.http1 import Exchange
from stoker.router import tracing
from stoker.router.config import LimitsConfig
from stoker.router.core.seam import PASSED
from stoker.router.flights.continuation import Answer, Continuations, Rest
from stoker.router.flights.routing import Router
from stoker.router.http.engines import EngineFailed, Engines, request_headers
from stoker.router.http.relay import Call, Relay
from stoker.router.prompts.prompt import CHAT

log = structlog.get_logger(__name__)

_PATH = "/v1/completions"
_ASKING = b'{"return_token_ids":true,'
# Inside a JSON text each quotation mark has a backslash before it: only a field can look like this. It begins with a
# literal because the pattern is then found ten times as fast.
_IDS = re.compile(rb'token_ids":\[[\d,\s]*\]')
_HIDDEN = b'token_ids":null'
_END, _EMPTY, _GOES_ON = b"\n\n", b'"delta":{},', b'"finish_reason":null'
_UNREAD_BYTES = 128 * 1024
"""Of each stream so much (some 500 tokens) is kept as it came before it is decoded."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Event).decode
_decode_all = msgspec.json.Decoder(list[_Event]).decode
_DONE = b"data: [DONE]\n\n"


class Noted:
    """What an answer's events said, noted as they pass."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.head: dict[str, Any] = {}
        """What the answer calls itself in each of its events."""
        self.counted = False
        """Its usage has been told."""
        self.ended = False
        """Its end mark has been sent: nothing is missing."""
        self._unread: list[bytes] = []
        self._bytes = 0

    def asking(self, raw: bytes) -> bytes:
        """The request, which asks for token ids too."""
        if "return_token_ids" in self.answer.fields:
            return raw
        return _ASKING + raw[raw.index(b"{") + 1 :]

    def passed(self, events: bytes) -> bytes:
        """Note whole events; returns them as they go to the client."""
        if not self.answer.said.broken:
            self._unread.append(events)
            self._bytes += len(events)
            if self._bytes > _UNREAD_BYTES:
                self.read()
        if self.answer.shows_tokens:
            return events
        events = _IDS.sub(_HIDDEN, events)
        return _without_empty(events) if _EMPTY in events else events

    def read(self) -> None:
        """Decode what has come since the last time."""
        unread, self._unread, self._bytes = b"".join(self._unread), [], 0
        self.ended = self.ended or unread.endswith(_DONE)
        for event in events_of(unread):
            if event is None:
                self.answer.said.spoil("unlike")
            else:
                self._note(event)

    def _note(self, event: _Event) -> None:
        said = self.answer.said
        if event.id and not self.head:
            self.head = {"id": event.id, "object": event.object, "created": event.created, "model": event.model}
        if bytes(event.error) != b"null":
            said.spoil("refused")  # the engine lives, and says that it failed
        elif not event.choices:
            self.counted = True
        for choice in event.choices:
            delta = choice.delta or _Delta()
            if delta.reasoning or delta.reasoning_content or bytes(delta.tool_calls) not in (b"null", b"[]"):
                said.spoil("reasoning" if delta.reasoning or delta.reasoning_content else "tool_calls")
            text = choice.text or delta.content or ""
            said.add(text, choice.token_ids or (), finished=choice.finish_reason is not None)


def _without_empty(events: bytes) -> bytes:
    """The events without those that were sent for their token ids alone, where a parser holds text back."""
    kept = [event for event in events.split(_END) if _EMPTY not in event or _GOES_ON not in event]
    return _END.join(kept)


def events_of(data: bytes) -> list[_Event | None]:
    """The events in whole lines of server-sent events, without the end mark; None for what is none."""
    try:
        # The usual case at once: line ends are never part of JSON texts.
        return list(_decode_all(b"[" + data.removesuffix(_DONE)[6:-2].replace(b"\n\ndata: ", b",") + b"]"))
    except msgspec.MsgspecError:
        pass
    events: list[_Event | None] = []
    for line in data.split(b"\n"):
        if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
            try:
                events.append(_decode(payload))
            except msgspec.MsgspecError:
                events.append(None)
    return events


class HttpContinuation:
    """Goes on with broken answers."""

    def __init__(self, router: Router, engines: Engines, limits: LimitsConfig) -> None:
        self.continuations = Continuations(router, limits.continuation)
        self._router = router
        self._engines = engines
        self._limits = limits

    async def go_on(self, call: Call, broken: Relay, noted: Noted, failure: StokerError) -> StokerError | None:
        """Say the rest of an answer on `broken`'s stream. None when it is whole, else what broke it off.

        The serving replica's flight has ended by now; each further one is released here.
        """
        answer, rest = noted.answer, None
        noted.read()  # what it said may be whole
        while not answer.said.finished:
            rest = await self.continuations.rest(answer)
            if rest is None:
                return failure
            try:
                failure = await self._leg(call, broken, noted, rest, failure) or failure
            except (Unavailable, TimeoutError):
                return failure
        tokens = rest.prompt_tokens if rest is not None else await self.continuations.prompt_tokens(answer)
        if tokens is None:
            return failure
        end = b"" if noted.ended else _DONE
        if not noted.counted and (answer.fields.get("stream_options") or {}).get("include_usage"):
            # What the first replica found in its cache it can say no more.
            said = len(answer.said.tokens)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens + said, "completion_tokens": said}
            end = _written({**noted.head, "choices": [], "usage": usage}) + end
        try:
            async with asyncio.timeout(self._limits.idle_s):
                await broken.say(end, last=True)
        except TimeoutError:
            return failure
        return None

    async def _leg(
        self, call: Call, broken: Relay, noted: Noted, rest: Rest, failure: StokerError
    ) -> StokerError | None:
        """One replica's part. None when it has ended, else what broke it off."""
        answer, course = noted.answer, noted.answer.course
        async with asyncio.timeout_at(call.deadline):
            boarding = await self._router.board(rest.plan, call.request_id, course.avoided, since=course.since)
        with boarding as flight, tracing.attempt(call.span, flight) as span:
            target = flight.decided.target
            course.serving, course.flowing = target.id, False
            relay = Relay(call, flight, self._limits, broken)
            headers = otel.carried(request_headers(call.request.headers, call.request_id), span) | target.headers
            try:
                body = _body(answer, rest)
                opened = relay.open(self._engines, _PATH, body, headers, course.avoided, lambda: True)
                async with opened as upstream:
                    if upstream.status != 200:
                        flight.answered(upstream.status)
                        log.error("answer.not_continued", replica=target.id, status=upstream.status)
                        return failure
                    await self._pass(relay, upstream, noted, rest)
                    flight.served()
            except EngineFailed as error:
                flight.faulted()
                return error if course.flowing else failure
            except TimeoutError:
                if not relay.engine_late:
                    raise
                flight.faulted()
                return failure
        return None

    async def _pass(self, relay: Relay, upstream: Exchange, noted: Noted, rest: Rest) -> None:
        answer, course = noted.answer, noted.answer.course
        async for chunk in relay.events(upstream):
            out = []
            if not course.flowing:
                course.flowing = True
                out.append(f": continued by {course.serving} after {len(answer.said.tokens)} tokens\n\n".encode())
            for event in events_of(chunk):
                if event is None or bytes(event.error) != b"null":
                    raise EngineFailed(f"replica {course.serving} failed in the middle of its answer")
                out += [_written(said) for choice in event.choices if (said := _said(choice, noted, rest))]
            await relay.say(b"".join(out))
            if rest.stops.met:
                return


def _said(choice: _Choice, noted: Noted, rest: Rest) -> dict[str, Any] | None:
    """A piece of the rest, as an event of the answer that it belongs to; None behind its end."""
    if noted.answer.said.finished:
        return None
    answer, stops, ids = noted.answer, rest.stops, choice.token_ids or []
    text, finish, stop = stops.feed(choice.text or ""), choice.finish_reason, choice.stop_reason
    if stops.met:
        finish, stop = "stop", stops.met
    elif finish is not None:
        text += stops.rest()
    answer.said.add(text, ids, finished=finish is not None)
    chat = answer.asked.api == CHAT
    shown: dict[str, Any] = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
    shown |= {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
    shown["token_ids"] = ids if answer.shows_tokens else None
    return {**noted.head, "choices": [shown]}


def _written(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _body(answer: Answer, rest: Rest) -> bytes:
    """The request for the rest: its prompt is tokens, its budget what is left."""
    body = {name: value for name, value in answer.fields.items() if name in PASSED}
    body |= {"prompt": rest.tokens, "max_tokens": rest.max_tokens, "stream": True, "return_token_ids": True}
    if rest.min_tokens:
        body["min_tokens"] = rest.min_tokens
    return msgspec.json.encode(body)
