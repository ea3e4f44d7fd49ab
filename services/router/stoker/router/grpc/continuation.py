"""A Generate stream over as many replicas as it takes: where one dies, another goes on with what was said."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import Code, DeadlineExceeded, StokerError
from stoker.router.flights.continuation import Answer, Continuations, Rest
from stoker.router.prompts.plan import Plan

Leg = Callable[[Plan, inference_pb2.GenerateRequest], AsyncGenerator[bytes, None]]
"""Streams a generation from one replica, and notes in the Answer which. Raises StokerError where it breaks off."""


class Silent(DeadlineExceeded):
    """The engine, not the caller, ran out of time."""


def fields_of(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """What a request sets, by vLLM's names where it has one."""
    messages = [request, request.sampling]
    if request.WhichOneof("prompt") == "chat":
        messages.append(request.chat)
    fields = {field.name: value for message in messages for field, value in message.ListFields()}
    fields.pop("sampling", None)
    if not request.extra.fields:
        fields.pop("extra", None)
    return fields


async def carried(
    continuations: Continuations, answer: Answer, request: inference_pb2.GenerateRequest, leg: Leg
) -> AsyncIterator[bytes]:
    """The whole stream. Raises what broke it off where nobody could go on."""
    rest: Rest | None = None
    failure: StokerError | None = None
    plan, course = answer.plan, answer.course
    request.return_token_ids = True
    while not answer.said.finished:
        if failure is not None:
            rest = await continuations.rest(answer)
            if rest is None:
                raise failure
            plan, request = rest.plan, _again(request, rest)
        course.flowing = False
        try:
            async with contextlib.aclosing(leg(plan, request)) as messages:
                async for message in messages:
                    response = inference_pb2.GenerateResponse.FromString(message)
                    if (passed := _passed(response, answer, rest)) is not None:
                        yield passed
                    if rest is not None and rest.stops.met:
                        break  # which the engine does not know of
                else:
                    return
        except StokerError as error:
            # What broke the answer off is told, not what became of trying to go on.
            failure = error if course.flowing or failure is None else failure
            broken = error.code is Code.UNAVAILABLE or isinstance(error, Silent)
            if not (broken and course.serving and (course.flowing or rest is not None)):
                raise failure from error
    prompt_tokens = rest.prompt_tokens if rest is not None else await continuations.prompt_tokens(answer)
    if prompt_tokens is None:
        raise failure or AssertionError("an answer without an end has a reason")
    yield _finished(prompt_tokens, answer, continued=rest is not None)


def _passed(response: inference_pb2.GenerateResponse, answer: Answer, rest: Rest | None) -> bytes | None:
    """A message as it goes to the caller; None where it is not for it."""
    if rest is not None and response.HasField("finished"):
        return _finished(rest.prompt_tokens, answer, continued=True)
    if not response.HasField("delta"):
        return response.SerializeToString() if rest is None else None
    delta = response.delta
    if delta.tool_calls or delta.reasoning:
        answer.said.spoil("reasoning" if delta.reasoning else "tool_calls")
    if rest is not None:
        delta.text = rest.stops.feed(delta.text)
        if rest.stops.met:
            delta.finish_reason, delta.stop_reason = "stop", rest.stops.met
        elif delta.finish_reason:
            delta.text += rest.stops.rest()
    answer.said.add(delta.text, delta.token_ids, finished=bool(delta.finish_reason))
    if not answer.shows_tokens:
        delta.ClearField("token_ids")
    return response.SerializeToString()


def _finished(prompt_tokens: int, answer: Answer, *, continued: bool) -> bytes:
    # What the first replica found in its cache it can say no more.
    usage = common_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(answer.said.tokens))
    finished = inference_pb2.Finished(usage=usage, continued=continued)
    return inference_pb2.GenerateResponse(finished=finished).SerializeToString()


def _again(request: inference_pb2.GenerateRequest, rest: Rest) -> inference_pb2.GenerateRequest:
    """The request for the rest of the answer: its prompt is tokens, its budget what is left."""
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.token_ids.ids[:] = rest.tokens
    again.sampling.max_tokens = rest.max_tokens
    again.sampling.ClearField("min_tokens")
    again.sampling.ClearField("add_special_tokens")
    if rest.min_tokens:
        again.sampling.min_tokens = rest.min_tokens
    return again
