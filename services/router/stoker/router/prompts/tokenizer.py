"""A model's tokenizer and chat template, from the files its engine uses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from stoker.common.errors import StokerError
from stoker.router.prompts.render import ChatTemplate, Conversation, NotRendered
from stoker.router.prompts.segments import SegmentedEncoder

log = structlog.get_logger(__name__)

# One prompt at a time: handing it to the library's own thread pool would only add a wake-up.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer:
    """Turns prompts into token ids as the engine does. Thread-safe; encoding releases the interpreter lock."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Build from file contents by name. Raises StokerError (BAD_TOKENIZER) where they cannot be used."""
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
        except KeyError as error:
            raise StokerError(
                "the model has no tokenizer.json: its prompts cannot be tokenized here", reason="BAD_TOKENIZER"
            ) from error
        except Exception as error:  # the library raises bare Exception
            raise StokerError(f"tokenizer.json cannot be read: {error}", reason="BAD_TOKENIZER") from error
        # Prompts are never cut here: one that is too long is refused.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._encoder = SegmentedEncoder(self._tokenizer)
        self._templates = _templates(files, config)
        self.max_chars_per_token: int = max(map(len, self._tokenizer.get_vocab()), default=1)
        """No token stands for more characters than this: a bound on a text's tokens without counting them."""

    def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> Sequence[int]:
        """The token ids of a text. Raises TooMuchNew where more than `most_new` characters were never seen."""
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, most_new=most_new)

    def pieces(self, prompt: Sequence[int], tokens: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
        """The text that each of `tokens` adds behind `prompt`, as an engine streams it.

        A token that only begins a character adds nothing; the one that ends it adds it. Raises ValueError.
        """
        stream = DecodeStream(list(prompt), skip_special_tokens)
        try:
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"these tokens have no text: {error}") from error

    def render(self, conversation: Conversation) -> str:
        """A conversation as prompt text. Raises NotRendered."""
        template = self._templates.get("tool_use") if conversation.tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise NotRendered("the model has no chat template")
        return template.render(conversation)


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    sources: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):  # several, by name
        sources = {entry["name"]: entry["template"] for entry in declared}
    if "chat_template.json" in files:
        sources["default"] = json.loads(files["chat_template.json"])["chat_template"]
    # A file of its own wins over what is declared elsewhere.
    if "chat_template.jinja" in files:
        sources["default"] = files["chat_template.jinja"].decode()
    special = _special_tokens(config)
    templates = {}
    for name, source in sources.items():
        try:
            templates[name] = ChatTemplate(source, special)
        except NotRendered as error:
            log.error("tokenizer.bad_chat_template", template=name, error=error.message)
    return templates


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    special: dict[str, Any] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            special[name] = token
    return special
