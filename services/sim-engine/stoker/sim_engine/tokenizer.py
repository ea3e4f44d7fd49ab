"""The model directory's tokenizer and chat template, without the model's libraries."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

# One prompt at a time: the library's own thread pool would only add a wake-up.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SAID = 4096
"""How many different tokens the simulated model can say."""
_LONG = 8192
"""Characters from which on a text takes milliseconds."""


class TemplateError(ValueError):
    """The chat template refuses these messages."""


class Tokenizer:
    """Text to token ids and back, and chats to text."""

    def __init__(self, model: Path) -> None:
        self._backend = Backend.from_file(str(model / "tokenizer.json"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and token
        }
        source = config.get("chat_template")
        separate = model / "chat_template.jinja"
        if not isinstance(source, str) and separate.exists():
            source = separate.read_text()
        self._template = _compile(source) if isinstance(source, str) else None
        self.vocabulary_size = self._backend.get_vocab_size()
        self._texts: dict[int, str] = {}
        self.sayable = tuple(
            token
            for token in range(min(self.vocabulary_size, 2 * _SAID))
            if (text := self.text(token)).isascii() and text.strip().isprintable() and text.strip()
        )[:_SAID]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer adds, a begin mark for instance."""
        # `encode` would hold the interpreter lock all the while.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    async def encode_aside(self, text: str, *, special: bool = True) -> list[int]:
        """The same, and the event loop goes on meanwhile: a long text takes seconds."""
        if len(text) <= _LONG:
            return self.encode(text, special=special)
        return await asyncio.to_thread(self.encode, text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def text(self, token: int) -> str:
        """What one generated token adds to the answer; nothing for special tokens."""
        if (known := self._texts.get(token)) is None:
            known = self._texts[token] = str(self._backend.decode([token], skip_special_tokens=True))
        return known

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a chat. Raises `TemplateError` with the template's own words."""
        if self._template is None:
            raise TemplateError("This model has no chat template.")
        if not messages:
            raise TemplateError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        try:
            return self._template.render(
                messages=[_plain(message) for message in messages],
                tools=[_tool(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        except KeyError as error:
            raise TemplateError(f"A tool has no {error}.") from error


def _compile(source: str) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as others do
    return environment.from_string(source)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM hands messages to templates: text parts joined, tool arguments as values."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM hands tools to templates: known fields only, in its own order, absent ones null."""
    function = tool["function"]
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    for optional in ("strict", "defer_loading"):
        if function.get(optional) is not None:
            shown[optional] = function[optional]
    return {"type": tool.get("type", "function"), "function": shown}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = json.loads(arguments) if arguments else {}
    return {**call, "function": function}
