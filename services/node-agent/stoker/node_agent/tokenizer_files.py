"""The files that make a model's tokenizer, found on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.node_agent.core.task import Task

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
"""The only files that are ever handed out."""

_MAX_BYTES = 64 << 20
"""A bigger file is no tokenizer."""


def find(task: Task) -> dict[str, bytes]:
    """The tokenizer's files by name; none where the model's directory is not on this host."""
    folder = _folder(_option(task.engine_args, "--tokenizer") or task.model, {**os.environ, **task.env})
    files: dict[str, bytes] = {}
    if folder is not None:
        for name in NAMES:
            path = folder / name
            if path.is_file() and path.stat().st_size <= _MAX_BYTES:
                files[name] = path.read_bytes()
    template = _option(task.engine_args, "--chat-template")
    if template is not None and files:
        path = Path(template)
        # The option takes a file or the template itself.
        files["chat_template.jinja"] = path.read_bytes() if _is_file(path) else template.encode()
    return files


def _option(args: tuple[str, ...], name: str) -> str | None:
    for at, arg in enumerate(args):
        head, sep, value = arg.partition("=")
        if head == name:
            return value if sep else args[at + 1] if at + 1 < len(args) else None
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a template is too long for a file's name
        return False


def _folder(model: str, env: Mapping[str, str]) -> Path | None:
    """The directory of a model: itself, or its newest snapshot in the hub's cache."""
    path = Path(model)
    if _is_file(path / "config.json") or path.is_dir():
        return path
    home = Path(env.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(env.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        revision = (cache / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = cache / "snapshots" / revision
    return folder if folder.is_dir() else None
