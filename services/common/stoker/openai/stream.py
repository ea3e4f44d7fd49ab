"""From the engine's server-sent events to Deltas. Bytes in, messages out: no I/O here.

What arrived together leaves together: one Delta per choice for each piece of the stream, however many events
that piece holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import Code, Exhausted, InvalidRequest, StokerError, Unavailable

_MAX_EVENT_BYTES = 16 << 20

_FIELDS = {
    **dict.fromkeys(("prompt", "messages", "input", "input_tokens"), "prompt"),
    **dict.fromkeys(("structured_outputs", "response_format"), "structured_output"),
    **dict.fromkeys(("tools", "tool_choice", "chat_template"), "chat"),
    **dict.fromkeys(("model", "priority", "cache_salt"), ""),
}
"""Request fields by the engine's names, where they are not those of Sampling."""


class SlowReader(StokerError):
    """The caller did not read what was generated for it."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "SLOW_READER"


class _TopLogprob(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None


class _TokenLogprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Error(msgspec.Struct):
    message: str = ""
    detail: str = ""
    """From the HTTP server rather than from the API behind it."""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class EventStream:
    """Parses one response. `done` once the engine said that all is said."""

    def __init__(self) -> None:
        self.done = False
        self.usage: common_pb2.Usage | None = None
        self.emitted = False
        """Whether any output was seen."""
        self._rest = b""

    def feed(self, data: bytes) -> list[inference_pb2.Delta]:
        """The output in what arrived, one Delta per choice. Raises StokerError when the engine reports one."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise StokerError(
                f"the engine sent an event of more than {_MAX_EVENT_BYTES} bytes", reason="ENGINE_ERROR"
            )
        deltas: dict[int, inference_pb2.Delta] = {}
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), deltas)
        self.emitted = self.emitted or bool(deltas)
        return list(deltas.values())

    def _event(self, payload: bytes, deltas: dict[int, inference_pb2.Delta]) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            raise StokerError(f"the engine sent what is no event: {error}", reason="ENGINE_ERROR") from error
        if (error_body := bytes(chunk.error)) not in {b"", b"null"}:
            raise refusal(500, b'{"error":' + error_body + b"}")
        if chunk.usage is not None:
            self.usage = usage_of(chunk.usage)
        for choice in chunk.choices:
            delta = deltas.get(choice.index)
            if delta is None:
                delta = deltas[choice.index] = inference_pb2.Delta(index=choice.index)
            _add(delta, choice)


def _add(delta: inference_pb2.Delta, choice: _Choice) -> None:
    if choice.text:
        delta.text += choice.text
    message = choice.delta
    if message is not None:
        if message.content:
            delta.text += message.content
        if reasoning := message.reasoning or message.reasoning_content:
            delta.reasoning += reasoning
        for call in message.tool_calls or ():
            _add_tool_call(delta, call)
    if choice.token_ids:
        delta.token_ids.extend(choice.token_ids)
    if choice.logprobs is not None:
        delta.logprobs.extend(_logprobs(choice.logprobs))
    if choice.finish_reason:
        delta.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        delta.stop_reason = str(choice.stop_reason)


def _add_tool_call(delta: inference_pb2.Delta, call: _ToolCall) -> None:
    function = call.function or _Function()
    last = delta.tool_calls[-1] if delta.tool_calls else None
    if last is not None and last.index == call.index and not call.id:
        last.arguments += function.arguments or ""
        return
    delta.tool_calls.add(
        index=call.index, id=call.id or "", name=function.name or "", arguments=function.arguments or ""
    )


def _logprobs(logprobs: _Logprobs) -> Iterable[inference_pb2.TokenLogprob]:
    if logprobs.content is not None:  # chat
        for item in logprobs.content:
            yield inference_pb2.TokenLogprob(
                token=item.token,
                logprob=item.logprob,
                token_bytes=_bytes(item),
                top=[
                    inference_pb2.TopLogprob(token=top.token, logprob=top.logprob, token_bytes=_bytes(top))
                    for top in item.top_logprobs
                ],
            )
        return
    tokens = logprobs.tokens or []
    values = logprobs.token_logprobs or [None] * len(tokens)
    tops = logprobs.top_logprobs or [None] * len(tokens)
    for token, value, top in zip(tokens, values, tops, strict=False):
        yield inference_pb2.TokenLogprob(
            token=token,
            logprob=value or 0.0,  # an echoed prompt's first token has none
            token_bytes=token.encode(),
            top=[
                inference_pb2.TopLogprob(token=rival, logprob=chance, token_bytes=rival.encode())
                for rival, chance in (top or {}).items()
            ],
        )


def _bytes(item: _TopLogprob) -> bytes:
    return bytes(item.bytes) if item.bytes is not None else item.token.encode()


def usage_of(usage: _Usage) -> common_pb2.Usage:
    """Tokens counted."""
    details = usage.prompt_tokens_details
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=details.cached_tokens if details is not None else None,
        completion_tokens=usage.completion_tokens or 0,
    )


def refusal(status: int, content: bytes) -> StokerError:
    """What the engine refused, as an error of the call: a 4xx is the caller's, the rest is the engine's."""
    try:
        tree = msgspec.json.decode(content)
        error = msgspec.convert(tree.get("error", tree), _Error)
    except (msgspec.MsgspecError, AttributeError):
        error = _Error(content[:500].decode("utf-8", "replace"))
    if status == 500 and isinstance(error.code, int):
        status = error.code
    if status in {404, 405} and error.detail:
        return StokerError(
            "the engine of this model does not offer this; ask a replica whose model does",
            reason="NOT_OFFERED",
            code=Code.UNIMPLEMENTED,
        )
    message = (error.message or error.detail or f"the engine answered {status}")[:2000]
    if status in {408, 429}:
        return Exhausted(message, reason="ENGINE_BUSY", retry_after_s=1.0)
    if status == 503:
        return Unavailable(message, reason="ENGINE_UNAVAILABLE", retry_after_s=1.0)
    if 400 <= status < 500:
        if error.param:
            return InvalidRequest.field(_field(error.param), message)
        return InvalidRequest(message)
    return StokerError(f"the engine failed: {message}", reason="ENGINE_ERROR", code=Code.INTERNAL)


def _field(param: str) -> str:
    known = _FIELDS.get(param)
    if known is None:
        return f"sampling.{param}"
    return known or param
