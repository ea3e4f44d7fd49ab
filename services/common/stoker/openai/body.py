"""From a GenerateRequest to the engine's OpenAI request: same meaning, nothing dropped, nonsense refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import InvalidRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_RESERVED = {"model", "prompt", "messages", "stream", "stream_options"}
"""The relay depends on these."""
_MAX_STOPS = 64
MOST_TOKEN_IDS = 1_000_000
"""In one prompt. To copy so many takes 0.1 s, in which nothing else happens."""
# To read so much takes some 50 ms each.
_MOST_ITEMS = 20_000
_MOST_STRUCT_BYTES = 512 * 1024
_MOST_BIASES = 100_000

_SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "include_stop_str_in_output", "ignore_eos", "n",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "add_special_tokens", "echo",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")

_OWN = frozenset({
    *_RESERVED, *_SCALARS, *_LISTS, "logit_bias", "logprobs", "top_logprobs", "max_completion_tokens", "best_of",
    "structured_outputs", "cache_salt", "priority", "return_token_ids", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
"""What `extra` may not set: a bound would not hold, or a ticket, or routing would read another prompt."""

_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_tokens": (lambda v: v >= 1, "must be at least 1"),
    "temperature": (lambda v: v >= 0, "must be 0 or more"),
    "top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "top_k": (lambda v: v >= -1, "must be -1 (all) or more"),
    "min_p": (lambda v: 0 <= v <= 1, "must be from 0 to 1"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "must be from -2 to 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "must be from -2 to 2"),
    "repetition_penalty": (lambda v: v > 0, "must be above 0"),
    "n": (lambda v: v >= 1, "must be at least 1"),
    "truncate_prompt_tokens": (lambda v: v == -1 or v >= 1, "must be -1 or at least 1"),
}


def build(
    request: inference_pb2.GenerateRequest,
    model: str,
    *,
    max_model_len: int = 0,
    max_output: int = 0,
    max_n: int = 128,
    read: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The engine's path and body. Limits of 0 are unknown, and then left to the engine.

    `read` is what `chat_fields` made of the request's chat, where that was asked before; it is left as it is.

    Raises InvalidRequest naming the field that can never work.
    """
    sampling = request.sampling
    _check(sampling, max_output, max_n)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    chat = request.WhichOneof("prompt") == "chat"
    body |= _chat_prompt(request.chat, read) if chat else _plain_prompt(request, max_model_len)
    body |= _sampling(sampling, chat, max_output)
    if request.HasField("structured_output"):
        body["structured_outputs"] = _structured(request.structured_output)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.HasField("priority"):
        body["priority"] = request.priority
    if request.return_token_ids:
        body["return_token_ids"] = True
    body |= _extra(request.extra)
    return CHAT if chat else COMPLETIONS, body


def _check(sampling: inference_pb2.Sampling, max_output: int, max_n: int) -> None:
    for name, (fits, what) in _BOUNDS.items():
        if sampling.HasField(name) and not fits(getattr(sampling, name)):  # type: ignore[arg-type]  # names of the message
            raise InvalidRequest.field(f"sampling.{name}", f"{what}, is {getattr(sampling, name):g}")
    if sampling.n > max_n:
        raise InvalidRequest.field("sampling.n", f"must be at most {max_n}, is {sampling.n}")
    if max_output and sampling.max_tokens > max_output:
        raise InvalidRequest.field(
            "sampling.max_tokens", f"this deployment allows at most {max_output}, asked for {sampling.max_tokens}"
        )
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest.field("sampling.min_tokens", f"must be at most max_tokens ({sampling.max_tokens})")
    if len(sampling.stop) > _MAX_STOPS or "" in sampling.stop:
        raise InvalidRequest.field("sampling.stop", f"give at most {_MAX_STOPS} texts, none of them empty")
    for name in _LISTS:
        if len(getattr(sampling, name)) > MOST_TOKEN_IDS:
            raise InvalidRequest.field(f"sampling.{name}", f"give at most {MOST_TOKEN_IDS}")
    if len(sampling.logit_bias) > _MOST_BIASES:
        raise InvalidRequest.field("sampling.logit_bias", f"give at most {_MOST_BIASES}")
    for token, bias in sampling.logit_bias.items():
        if math.isnan(bias) or not -100 <= bias <= 100:
            raise InvalidRequest.field("sampling.logit_bias", f"must be from -100 to 100, is {bias:g} for {token}")


def _sampling(sampling: inference_pb2.Sampling, chat: bool, max_output: int) -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(sampling, name) for name in _SCALARS if sampling.HasField(name)}  # type: ignore[arg-type]
    body |= {name: list(values) for name in _LISTS if (values := getattr(sampling, name))}
    if max_output:
        body.setdefault("max_tokens", max_output)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs} if chat else {"logprobs": sampling.logprobs}
    return body


def _plain_prompt(request: inference_pb2.GenerateRequest, max_model_len: int) -> dict[str, Any]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        if not request.text:
            raise InvalidRequest.field("text", "the prompt is empty; give at least one character")
        return {"prompt": request.text}
    if kind != "token_ids":
        raise InvalidRequest.field("prompt", "missing; set one of text, token_ids or chat")
    ids = request.token_ids.ids
    if not ids:
        raise InvalidRequest.field("token_ids.ids", "the prompt is empty; give at least one token")
    if max_model_len and len(ids) >= max_model_len and not request.sampling.HasField("truncate_prompt_tokens"):
        raise InvalidRequest.field(
            "token_ids.ids", f"{len(ids)} tokens leave no room for output: the model takes {max_model_len} in all"
        )
    if len(ids) > MOST_TOKEN_IDS:
        raise InvalidRequest.field("token_ids.ids", f"{len(ids)} tokens; at most {MOST_TOKEN_IDS} are taken")
    return {"prompt": list(ids)}


def _chat_prompt(chat: inference_pb2.Chat, read: Mapping[str, Any] | None) -> dict[str, Any]:
    body = dict(read or chat_fields(chat))
    if chat.tool_choice:
        choice = chat.tool_choice
        named = choice not in {"auto", "none", "required"}
        body["tool_choice"] = {"type": "function", "function": {"name": choice}} if named else choice
    if chat.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = chat.parallel_tool_calls
    return body


def _refuse_huge(chat: inference_pb2.Chat) -> None:
    """A conversation that would hold up everything else while it is read."""
    items = len(chat.messages) + len(chat.tools)
    if items <= _MOST_ITEMS:
        items += sum(len(message.content) + len(message.tool_calls) for message in chat.messages)
    if items > _MOST_ITEMS:
        raise InvalidRequest.field(
            "chat.messages", f"messages, their parts and tools are more than {_MOST_ITEMS}; send fewer"
        )
    size = chat.template_kwargs.ByteSize() + sum(tool.parameters.ByteSize() for tool in chat.tools)
    if size > _MOST_STRUCT_BYTES:
        raise InvalidRequest.field(
            "chat.tools", f"their parameters and template_kwargs are more than {_MOST_STRUCT_BYTES} bytes"
        )


def chat_fields(chat: inference_pb2.Chat) -> dict[str, Any]:
    """What renders a conversation: the part that generating, tokenizing and routing share. Raises InvalidRequest."""
    _refuse_huge(chat)
    if not chat.messages:
        raise InvalidRequest.field("chat.messages", "the conversation is empty; give at least one message")
    body: dict[str, Any] = {"messages": [_message(message, at) for at, message in enumerate(chat.messages)]}
    if chat.tools:
        body["tools"] = [_tool(tool, at) for at, tool in enumerate(chat.tools)]
    if chat.HasField("template_kwargs"):
        body["chat_template_kwargs"] = _struct("chat.template_kwargs", chat.template_kwargs)
    if chat.template:
        body["chat_template"] = chat.template
    if chat.omit_generation_prompt or chat.continue_final_message:
        body["add_generation_prompt"] = False
    if chat.continue_final_message:
        body["continue_final_message"] = True
    return body


def _message(message: inference_pb2.ChatMessage, at: int) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest.field(f"chat.messages[{at}].role", "missing; for example user")
    body: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name:
        body["name"] = message.name
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        body["reasoning"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _content(message: inference_pb2.ChatMessage) -> Any:
    parts = message.content
    if not parts:
        return None if message.tool_calls else ""
    if len(parts) == 1 and parts[0].WhichOneof("part") == "text":
        return parts[0].text
    return [_part(part) for part in parts]


def _part(part: inference_pb2.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part") or "text"
    return {"type": kind, kind: part.text if kind == "text" else {"url": getattr(part, kind)}}


def _tool(tool: inference_pb2.Tool, at: int) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequest.field(f"chat.tools[{at}].name", "missing")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = _struct(f"chat.tools[{at}].parameters", tool.parameters)
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _structured(form: inference_pb2.StructuredOutput) -> dict[str, Any]:
    match form.WhichOneof("form"):
        case "json_schema":
            return {"json": form.json_schema}
        case "json_object":
            return {"json_object": form.json_object}
        case "regex":
            return {"regex": form.regex}
        case "grammar":
            return {"grammar": form.grammar}
        case "choices" if form.choices.texts:
            return {"choice": list(form.choices.texts)}
        case "structural_tag":
            return {"structural_tag": form.structural_tag}
    raise InvalidRequest.field("structured_output", "empty; set one of its forms")


def _extra(extra: struct_pb2.Struct) -> dict[str, Any]:
    if extra.ByteSize() > _MOST_STRUCT_BYTES:
        raise InvalidRequest.field("extra", f"is larger than {_MOST_STRUCT_BYTES} bytes")
    for name in extra.fields:
        if name in _OWN:
            raise InvalidRequest.field(f"extra.{name}", "cannot be set here; use the request's own field")
    # Looking up a message map would make the entry.
    if "vllm_xargs" in extra.fields and "kv_cache_report_mode" in extra.fields["vllm_xargs"].struct_value.fields:
        # The engine would announce again what it holds, and the digest count copies that are none.
        raise InvalidRequest.field(
            "extra.vllm_xargs.kv_cache_report_mode", "cannot be chosen by a request; leave it out"
        )
    return _struct("extra", extra)


def _struct(field: str, struct: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as plain values; its numbers are doubles, whole ones become integers again."""
    try:
        return {name: _whole(value) for name, value in json_format.MessageToDict(struct).items()}
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest.field(field, f"holds what JSON cannot say: {error}") from error


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return value
