"""A gRPC request's prompt, in the terms that the HTTP path uses: as the node agent will hand it to its engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from stoker.api.inference.v1 import inference_pb2
from stoker.api.router.v1 import router_pb2
from stoker.common.blocks import unpack_keys
from stoker.common.errors import InvalidRequest
from stoker.openai.body import MOST_TOKEN_IDS, chat_fields
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, Asked, Prompt, asked_in_tokens, chat, keyed, tokenized

_MOST_TEXTS = 2048  # as node agents take


def request_id_of(given: str) -> str:
    """The id that a caller gave its request, or a new one. Raises InvalidRequest for what no header can hold."""
    if not given.isprintable() or not given.isascii():
        raise InvalidRequest.field("request_id", "must be printable ASCII characters, of which the first 128 count")
    return given[:128] or secrets.token_hex(16)


def of_generate(request: inference_pb2.GenerateRequest, raw: bytes) -> Asked:
    """Read a Generate request. Raises InvalidRequest naming the field."""
    _need_model(request.model)
    sampling = request.sampling
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest.field("prompt", "give one of text, token_ids and chat")
    common: dict[str, Any] = {
        "raw": raw,
        "max_output_tokens": sampling.max_tokens if sampling.HasField("max_tokens") else None,
        "max_output_field": "sampling.max_tokens",
        "choices": max(1, sampling.n),
        "cache_salt": request.cache_salt,
        "truncate_to": sampling.truncate_prompt_tokens if sampling.HasField("truncate_prompt_tokens") else None,
    }
    special = sampling.add_special_tokens if sampling.HasField("add_special_tokens") else kind != "chat"
    fields = _fields(kind, request)
    prompt = _prompt(kind, request, fields, common | {"add_special_tokens": special})
    api = CHAT if kind == "chat" else COMPLETIONS
    return Asked(api, request.model, prompt, True, request.session_id, request.priority, fields)


def of_tokenized(request: router_pb2.TokenizedPrompt) -> Asked:
    """Read a prompt that its caller tokenized. Raises InvalidRequest naming the field."""
    _need_model(request.model)
    match request.WhichOneof("prompt"):
        case "token_ids":
            told = tokenized(request.token_ids)
        case "block_keys":
            told = keyed(unpack_keys(request.block_keys), request.prompt_tokens, request.block_size)
        case _:
            raise InvalidRequest.field("tokenized.prompt", "give one of token_ids and block_keys")
    return asked_in_tokens(
        request.model,
        told,
        max_output_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        choices=request.n,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        priority=request.priority,
    )


def of_embed(request: inference_pb2.EmbedRequest, raw: bytes) -> Asked:
    """Read an Embed request. Raises InvalidRequest naming the field."""
    _need_model(request.model)
    if not 1 <= len(request.texts) <= _MOST_TEXTS:
        raise InvalidRequest.field("texts", f"give 1 to {_MOST_TEXTS} texts, not {len(request.texts)}")
    return Asked("embeddings", request.model, Prompt(raw, texts=list(request.texts)))


def of_tokenize(request: inference_pb2.TokenizeRequest, raw: bytes) -> Asked:
    """Read a Tokenize request. Raises InvalidRequest naming the field."""
    _need_model(request.model)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest.field("prompt", "give one of text and chat")
    special = request.add_special_tokens if request.HasField("add_special_tokens") else kind != "chat"
    prompt = _prompt(kind, request, _fields(kind, request), {"raw": raw, "add_special_tokens": special})
    return Asked("tokenize", request.model, prompt)


def _need_model(model: str) -> None:
    if not model:
        raise InvalidRequest.field("model", "name the model to ask, one that ListModels lists")


def _fields(kind: str, request: Any) -> dict[str, Any]:
    """What an engine will read of a chat; of other prompts nothing."""
    return chat_fields(request.chat) if kind == "chat" else {}


def _prompt(kind: str, request: Any, fields: Mapping[str, Any], common: dict[str, Any]) -> Prompt:
    if kind == "text":
        return Prompt(texts=(request.text,), **common)
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidRequest.field("token_ids.ids", "give at least one token")
        if len(request.token_ids.ids) > MOST_TOKEN_IDS:
            return Prompt(unreadable="many_values", **common)  # to be refused where it is sent
        return Prompt(token_ids=(list(request.token_ids.ids),), **common)
    return chat(fields, common)
