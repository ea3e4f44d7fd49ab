"""Requests from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.api.inference.v1 import inference_pb2
from stoker.api.router.v1 import router_pb2
from stoker.common.blocks import pack_tokens
from stoker.common.errors import InvalidRequest

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages as the OpenAI API writes them."""

_MEDIA = ("image_url", "audio_url", "video_url")
_SAMPLING = {field.name for field in inference_pb2.Sampling.DESCRIPTOR.fields}


def request_of(
    model: str,
    prompt: Prompt,
    *,
    session_id: str = "",
    cache_salt: str = "",
    priority: int | None = None,
    request_id: str = "",
    return_token_ids: bool = False,
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """A request; `sampling` are the fields of `Sampling`. Raises InvalidRequest naming the field."""
    if unknown := sorted(sampling.keys() - _SAMPLING):
        raise InvalidRequest.field(unknown[0], f"is no sampling field; these are: {', '.join(sorted(_SAMPLING))}")
    given = {name: value for name, value in sampling.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=inference_pb2.Sampling(**given),
            session_id=session_id,
            cache_salt=cache_salt,
            priority=priority,
            request_id=request_id,
            return_token_ids=return_token_ids,
        )
        _put(request, prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written: {error}") from error
    return request


def _put(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise InvalidRequest.field("prompt", "give a text, token ids, or messages")
    elif isinstance(prompt[0], Mapping):
        request.chat.messages.extend(_message(place, message) for place, message in enumerate(prompt))
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # protobuf refuses what is no number


def _message(place: int, message: Any) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest.field(f"messages[{place}]", "must be a mapping with a role")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return inference_pb2.ChatMessage(
        role=message["role"],
        content=[_part(f"messages[{place}].content", part) for part in parts],
        name=message.get("name") or "",
        tool_call_id=message.get("tool_call_id") or "",
        tool_calls=[
            inference_pb2.ToolCall(id=call["id"], **{k: call["function"][k] for k in ("name", "arguments")})
            for call in message.get("tool_calls") or ()
        ],
    )


def _part(field: str, part: Any) -> inference_pb2.ContentPart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return inference_pb2.ContentPart(text=part["text"])
    if kind in _MEDIA:
        given = part[kind]
        media = inference_pb2.ContentPart()
        setattr(media, kind, given.get("url") if isinstance(given, Mapping) else given)
        return media
    raise InvalidRequest.field(field, f"each part has type text, {', '.join(_MEDIA)}")


def pick_of(request: inference_pb2.GenerateRequest, alternatives: int) -> router_pb2.PickRequest:
    """What a router needs to know of a request: token ids go packed, which it reads without looking at each."""
    sampling = request.sampling
    if request.WhichOneof("prompt") != "token_ids" or sampling.HasField("truncate_prompt_tokens"):
        return router_pb2.PickRequest(request=request, alternatives=alternatives)
    return router_pb2.PickRequest(
        tokenized=router_pb2.TokenizedPrompt(
            model=request.model,
            token_ids=pack_tokens(request.token_ids.ids),
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
            n=sampling.n,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            priority=request.priority if request.HasField("priority") else None,
            request_id=request.request_id,
        ),
        alternatives=alternatives,
    )
