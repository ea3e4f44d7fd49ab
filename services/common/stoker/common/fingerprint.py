"""What tells one tokenizer from another: agents announce it, routers check it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def fingerprint(files: Mapping[str, bytes]) -> str:
    """SHA-256 of the tokenizer and the chat template, in hexadecimal; empty where there is no tokenizer.json.

    `files` holds a model directory's files by name.
    """
    if "tokenizer.json" not in files:
        return ""
    digest = hashlib.sha256(files["tokenizer.json"])
    digest.update(b"\0")
    digest.update(_template(files))
    return digest.hexdigest()


def _template(files: Mapping[str, bytes]) -> bytes:
    """The chat template, wherever the model keeps it."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            template = json.loads(files.get(name, b"{}")).get("chat_template")
        except (ValueError, AttributeError):
            continue
        if template:
            return (template if isinstance(template, str) else json.dumps(template, sort_keys=True)).encode()
    return b""
