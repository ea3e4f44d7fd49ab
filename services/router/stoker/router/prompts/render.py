"""A model's chat template, rendered as its engine renders it.

What templates may use is what the `transformers` library gives them: a sandbox with `raise_exception`,
`strftime_now`, a `tojson` that escapes no HTML, loop controls and `{% generation %}`. How messages are
prepared for a template (content parts, tool calls) follows vLLM's OpenAI server. Whether all this agrees
with a given engine is not assumed: the parity probe measures it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.common.errors import StokerError

Message = Mapping[str, Any]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_PARTS = {
    *("image_url", "input_image", "image", "image_pil", "image_embeds"),
    *("audio_url", "input_audio", "audio_embeds", "video_url", "input_video"),
}
MEDIA_MARK = "\ue000stoker-media\ue000"
"""Stands in a rendered prompt where the engine puts the tokens of an image, a sound or a video."""
# The space shows whether the template trims what it prints.
_CONTINUE_MARK = "\ue000stoker-continue\ue000 "
# Attribution that some clients put first in a system prompt; it changes with every request, and the engine drops it.
_BILLING_HEADER = "x-anthropic-billing-header"


class NotRendered(StokerError):
    """This chat cannot be rendered here; the engine may know how, or will say what is wrong with it."""

    reason = "NOT_RENDERED"


@dataclass(frozen=True)
class Conversation:
    """A chat request, in the terms of the OpenAI API."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (`chat_template_kwargs`, `reasoning_effort`)."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """Compile. `special_tokens` are `bos_token`, `eos_token` … as text. Raises NotRendered on bad syntax."""
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise NotRendered(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._accepts = jinja2.meta.find_undeclared_variables(tree)
        self._wants_parts = _loops_over_content(tree)
        self._knows_developer = "'developer'" in source or '"developer"' in source

    def render(self, conversation: Conversation) -> str:
        """The prompt as text, with `MEDIA_MARK` for each of `media_of`.

        Raises NotRendered where the template refuses, or the content is of a kind unknown here.
        """
        messages = [self._prepare(message) for message in conversation.messages]
        if not messages:
            raise NotRendered("messages: an empty conversation has no prompt")
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = _merge_system(messages)
        if conversation.continue_final_message:
            messages = _mark_last(messages)
        variables = {
            **self._special_tokens,
            **{name: value for name, value in conversation.variables.items() if name in self._accepts},
            "messages": messages,
            "tools": [_tool(tool) for tool in conversation.tools] if conversation.tools is not None else None,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # templates are programs of other people
            raise NotRendered(f"the chat template refused the request: {error}") from error
        return _cut_at_mark(text) if conversation.continue_final_message else text

    def _prepare(self, message: Message) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str):
            raise NotRendered("messages: each needs a role")
        parts = _parts(message.get("content"), role)
        content: Any = "\n".join(part["text"] for part in parts)
        if self._wants_parts and role != "tool":
            content = parts
        prepared: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            calls = message.get("tool_calls")
            if calls:
                if not isinstance(calls, list):
                    raise NotRendered("messages: tool_calls must be a list")
                prepared["tool_calls"] = [_tool_call(call) for call in calls]
            if message.get("reasoning") is not None:
                prepared["reasoning"] = prepared["reasoning_content"] = message["reasoning"]
        elif role == "tool" and "tool_call_id" in message:
            prepared["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            prepared["tools"] = message.get("tools")
        if isinstance(message.get("name"), str):
            prepared["name"] = message["name"]
        return prepared


def media_of(conversation: Conversation) -> list[Mapping[str, Any]]:
    """The content parts that are no text, in order: what blocks behind them depend on besides their tokens."""
    contents = [message.get("content") for message in conversation.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and str(part.get("type")) in _MEDIA_PARTS]


def _parts(content: object, role: str) -> list[dict[str, Any]]:
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise NotRendered("messages: content must be a text or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA_PARTS:
            parts.append({"type": "text", "text": MEDIA_MARK})
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise NotRendered(f"messages: content parts of type {kind!r} are not rendered here")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            continue
        if role == "system" and text.startswith(_BILLING_HEADER):
            text = text.partition("\n")[2]
            if not text:
                continue
        parts.append({"type": "text", "text": text})
    return parts


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments become an object: templates expect that, the API sends JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise NotRendered("messages: tool_calls must have a function each")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the engine's request model writes it out: these fields, in this order."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise NotRendered("tools: each needs a function")
    written = {name: function.get(name) for name in ("name", "description", "parameters")}
    written.update({name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None})
    return {"type": "function", "function": written}


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages become system messages, and all of those one, in front."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [_flat(message["content"]) for message in system]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *rest]


def _flat(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content)


def _mark_last(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1]
    if isinstance(last["content"], list):
        if not last["content"]:
            raise NotRendered("continue_final_message: the last message has no text to continue")
        last["content"][-1]["text"] += _CONTINUE_MARK
    else:
        last["content"] += _CONTINUE_MARK
    return messages


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise NotRendered("continue_final_message: the template does not show the last message")
    # A template that trims has trimmed the mark in place of the message: that is done here, as transformers does.
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


# --- jinja -------------------------------------------------------------------------------------------------


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],  # autoescape stays off: prompts are no HTML
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the host's local time


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template walks through a message's content part by part, rather than printing it as text."""
    loops = list(tree.find_all(nodes.For))
    message_names = set(_loop_targets(loops, _aliases(tree, "messages")))
    content_params = {
        parameter.name
        for macro in tree.find_all(nodes.Macro)
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name
        for parameter, argument in zip(macro.args, call.args, strict=False)
        if any(_is_content(argument, name) for name in message_names)
    }
    return any(
        any(_is_content(loop.iter, name) for name in message_names)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in content_params | {"content"})
        for loop in loops
    )


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """`name` and whatever it, or a slice or filtering of it, is assigned to."""
    names = {name}
    grown = True
    while grown:
        grown = False
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in names and _root_name(assign.node) in names:
                names.add(target.name)
                grown = True
    return names


def _loop_targets(loops: Iterable[nodes.For], over: set[str]) -> Iterator[str]:
    for loop in loops:
        if isinstance(loop.target, nodes.Name) and _root_name(loop.iter) in over:
            yield loop.target.name


def _root_name(node: nodes.Node | None) -> str | None:
    while True:
        if isinstance(node, nodes.Name):
            return node.name
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return None


def _is_content(node: nodes.Node | None, variable: str) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Getitem):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name == variable
