"""What a request asks a model to read, whichever API it came by. One path for all: no route goes unhashed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from stoker.common.errors import InvalidRequest
from stoker.router.prompts.render import Conversation

COMPLETIONS = "completions"
CHAT = "chat_completions"
RESPONSES = "responses"
EMBEDDINGS = "embeddings"
TOKENIZE = "tokenize"

_MOST_KEYS = 1_000_000
_LONGEST_NUMBER = 32


class Tokenized(msgspec.Struct, frozen=True):
    """A prompt that its caller tokenized: token ids as little-endian u32, or else the keys of its full blocks (u64).

    `tokens` and `block_size`, in tokens, go with the keys.
    """

    packed: bytes = b""
    keys: Sequence[int] = ()
    tokens: int = 0
    block_size: int = 0


def tokenized(packed: bytes) -> Tokenized:
    """A prompt by its token ids, little-endian u32. Raises InvalidRequest."""
    if not packed or len(packed) % 4:
        raise InvalidRequest.field(
            "token_ids", f"{len(packed)} bytes are no token ids; give at least one, 4 bytes each, little-endian"
        )
    return Tokenized(packed)


def keyed(keys: Sequence[int], tokens: int, block_size: int) -> Tokenized:
    """A prompt by the keys of its full blocks. Raises InvalidRequest."""
    if not tokens:
        raise InvalidRequest.field("prompt_tokens", "say how many tokens the prompt has")
    if len(keys) > _MOST_KEYS:
        raise InvalidRequest.field("block_keys", f"holds {len(keys)} keys; no prompt has more than {_MOST_KEYS}")
    return Tokenized(keys=list(keys), tokens=tokens, block_size=block_size)


class Prompt(msgspec.Struct, frozen=True):
    """One of `texts`, `token_ids`, `conversation` and `tokenized` is set, or none where this router cannot read the
    prompt.

    `raw` is the request as it came: what is hashed where there are no tokens. Counts are in tokens.
    """

    raw: bytes
    texts: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()
    conversation: Conversation | None = None
    tokenized: Tokenized | None = None
    unreadable: str = ""
    """Why none is set."""
    add_special_tokens: bool = True
    truncate_to: int | None = None
    truncate_left: bool = False
    max_output_tokens: int | None = None
    max_output_field: str = "max_tokens"
    choices: int = 1
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """About how many bytes there are to tokenize."""
        return len(self.raw)


class Asked(msgspec.Struct, frozen=True):
    """A request body, read as far as routing needs."""

    api: str
    model: str
    prompt: Prompt
    stream: bool = False
    session_id: str = ""
    """`session_id` over gRPC, `prompt_cache_key` over HTTP."""
    priority: int = 0
    """Lower is sooner."""
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """All that was read: the body over HTTP, a chat's part of it over gRPC."""


def asked_in_tokens(
    model: str,
    prompt: Tokenized,
    *,
    max_output_tokens: int | None,
    choices: int,
    cache_salt: str,
    session_id: str,
    priority: int,
) -> Asked:
    """A request whose caller tokenized, to be picked for: its answer does not come this way."""
    read = Prompt(
        b"",
        tokenized=prompt,
        max_output_tokens=max_output_tokens,
        choices=max(1, choices),
        cache_salt=cache_salt,
    )
    return Asked(COMPLETIONS, model, read, False, session_id, priority)


def read(api: str, body: Mapping[str, Any], raw: bytes) -> Asked:
    """Read an OpenAI body as `decode` left it. Raises InvalidRequest where routing is impossible; the rest is the
    engine's.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest.field("model", "name the model to ask, for example one that GET /v1/models lists")
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict) and "kv_cache_report_mode" in xargs:
        # One caller's repeated events would look like further copies of blocks, and falsify the digest for all.
        raise InvalidRequest.field("vllm_xargs.kv_cache_report_mode", "cannot be chosen by a request; leave it out")
    reader = {
        CHAT: _chat,
        COMPLETIONS: _completion,
        RESPONSES: _responses,
        EMBEDDINGS: _embedding,
        TOKENIZE: _tokenize,
    }[api]
    session, priority = body.get("prompt_cache_key"), body.get("priority")
    return Asked(
        api,
        model,
        reader(body, raw),
        stream=body.get("stream") is True,
        session_id=session if isinstance(session, str) else "",
        priority=priority if isinstance(priority, int) else 0,
        fields=body,
    )


def _common(body: Mapping[str, Any], raw: bytes, *output_fields: str, special: bool) -> dict[str, Any]:
    limit, limit_field = None, output_fields[-1] if output_fields else "max_tokens"
    for name in output_fields:
        if (limit := _count(body.get(name))) is not None:
            limit_field = name
            break
    truncate = body.get("truncate_prompt_tokens")
    salt = body.get("cache_salt")
    wanted = body.get("add_special_tokens")
    return {
        "raw": raw,
        "max_output_tokens": limit,
        "max_output_field": limit_field,
        "choices": _count(body.get("n")) or 1,
        "cache_salt": salt if isinstance(salt, str) else "",
        "add_special_tokens": wanted if isinstance(wanted, bool) else special,
        "truncate_to": truncate if isinstance(truncate, int) and not isinstance(truncate, bool) else None,
        "truncate_left": body.get("truncation_side") == "left",
    }


def _is_costly(body: Mapping[str, Any]) -> bool:
    """Whether something that the prompt is made of was too much to decode."""
    return any(isinstance(value, Raw) for value in body.values())


def _count(value: object) -> int | None:
    """A number, as engines read it: `5.0` and `"5"` are 5 to them. None for what is none."""
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _are_counts(values: list[Any]) -> bool:
    # There may be millions, and the event loop waits.
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0


def _completion(body: Mapping[str, Any], raw: bytes) -> Prompt:
    common = _common(body, raw, "max_tokens", special=True)
    if _is_costly(body):
        return Prompt(unreadable="many_values", **common)
    if body.get("prompt_embeds") is not None or body.get("suffix") is not None:
        return Prompt(unreadable="embeds", **common)
    if body.get("prompt") is None:
        raise InvalidRequest.field("prompt", "give a text, a list of texts, or token ids")
    return _texts_or_ids(body["prompt"], common)


def _embedding(body: Mapping[str, Any], raw: bytes) -> Prompt:
    common = _common(body, raw, special=True)
    if _is_costly(body):
        return Prompt(unreadable="many_values", **common)
    if isinstance(body.get("messages"), list):
        return _conversation(body["messages"], body, common, prompt=False)
    if body.get("input") is None:
        raise InvalidRequest.field("input", "give a text, a list of texts, or token ids")
    return _texts_or_ids(body["input"], common)


def _texts_or_ids(value: object, common: dict[str, Any]) -> Prompt:
    if isinstance(value, str):
        return Prompt(texts=(value,), **common)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return Prompt(texts=value, **common)
        if _are_counts(value):
            return Prompt(token_ids=(value,), **common)
        if all(isinstance(item, list) and _are_counts(item) for item in value):
            return Prompt(token_ids=value, **common)
    return Prompt(unreadable="form", **common)


def _tokenize(body: Mapping[str, Any], raw: bytes) -> Prompt:
    return _chat(body, raw) if "messages" in body else _completion(body, raw)


def _chat(body: Mapping[str, Any], raw: bytes) -> Prompt:
    common = _common(body, raw, "max_completion_tokens", "max_tokens", special=False)
    if _is_costly(body):
        return Prompt(unreadable="many_values", **common)
    return chat(body, common)


def chat(body: Mapping[str, Any], common: Mapping[str, Any]) -> Prompt:
    """The prompt of a chat's body; `common` are a Prompt's fields beside the conversation. Raises InvalidRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest.field("messages", "give at least one message, for example a user's")
    if body.get("chat_template") is not None:
        # A template of the caller's is a program of a stranger: whether to run it is the engine's policy.
        return Prompt(unreadable="own_template", **common)
    return _conversation(messages, body, common, prompt=True)


def _conversation(messages: list[Any], body: Mapping[str, Any], common: Mapping[str, Any], *, prompt: bool) -> Prompt:
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest.field("messages", "each must be an object with role and content")
    variables = body.get("chat_template_kwargs")
    variables = dict(variables) if isinstance(variables, dict) else {}
    effort = body.get("reasoning_effort")
    _put_effort(variables, effort)
    tools = body.get("tools")
    continues = body.get("continue_final_message") is True
    adds = body.get("add_generation_prompt")
    conversation = Conversation(
        messages,
        tools if isinstance(tools, list) else None,
        documents=body.get("documents"),
        add_generation_prompt=adds if isinstance(adds, bool) else prompt,
        continue_final_message=continues,
        variables=variables,
    )
    return Prompt(conversation=conversation, **common)


def _put_effort(variables: dict[str, Any], effort: object) -> None:
    if isinstance(effort, str):
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort


# --- responses ---------------------------------------------------------------------------------------------


def _responses(body: Mapping[str, Any], raw: bytes) -> Prompt:
    common = _common(body, raw, "max_output_tokens", special=True)
    if _is_costly(body):
        return Prompt(unreadable="many_values", **common)
    if body.get("truncation") not in (None, "disabled"):
        common["truncate_to"] = -1
    if body.get("previous_response_id") is not None or body.get("prompt") is not None:
        # The rest of the conversation lies with the engine that answered before.
        return Prompt(unreadable="stored_history", **common)
    value = body.get("input")
    if not isinstance(value, str | list) or not value:
        raise InvalidRequest.field("input", "give a text or a list of items")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
    elif not all(_add_item(messages, item) for item in value):
        return Prompt(unreadable="items", **common)
    variables: dict[str, Any] = {}
    if isinstance(body.get("chat_template_kwargs"), dict):
        variables.update(body["chat_template_kwargs"])
    reasoning = body.get("reasoning")
    _put_effort(variables, reasoning.get("effort") if isinstance(reasoning, dict) else None)
    continues = isinstance(value, list) and _is_partial(value[-1])
    conversation = Conversation(
        messages,
        _responses_tools(body.get("tools")),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables=variables,
    )
    return Prompt(conversation=conversation, **common)


def _is_partial(item: object) -> bool:
    return (
        isinstance(item, dict)
        and item.get("type", "message") in ("message", "reasoning")
        and item.get("status") in ("in_progress", "incomplete")
    )


def _responses_tools(tools: object) -> list[dict[str, Any]] | None:
    """The flat tools of this API in the nested form that templates know."""
    if not isinstance(tools, list) or not tools:
        return None
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in tools
        if isinstance(tool, dict) and tool.get("type") == "function"
    ]


def _add_item(messages: list[dict[str, Any]], item: object) -> bool:
    """Add an input item to the conversation; False for a kind that is not rendered here."""
    if not isinstance(item, dict):
        return False
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            "type": "function",
        }
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        return True
    if kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        return True
    if kind != "message" or "role" not in item:
        return False
    if item["role"] == "assistant":
        content = item.get("content")
        if isinstance(content, list) and content:
            content = content[0].get("text") if isinstance(content[0], dict) else None
        if last is not None and last.get("content") is None:
            last["content"] = content
        else:
            messages.append({"role": "assistant", "content": content})
        return True
    messages.append(item)
    return True
