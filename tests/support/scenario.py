"""Scenarios as readable text: blocks of what happens, then `----`, then what must be decided.

Run with STOKER_REWRITE=1 to write the answers anew; then read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def run(path: Path, play: Callable[[str], Iterable[str]]) -> None:
    """Plays the scenario in `path` and compares each block's answer with the one written there."""
    written = path.read_text()
    played = "\n".join(_play_block(block, play) for block in written.rstrip("\n").split("\n\n")) + "\n"
    if os.environ.get("STOKER_REWRITE"):
        path.write_text(played)
        return
    assert played == written, f"{path.name} decides otherwise"


def _play_block(block: str, play: Callable[[str], Iterable[str]]) -> str:
    story, mark, _ = block.partition("\n----")
    if block.startswith("----"):
        raise AssertionError("a block begins with what happens")
    shown: list[str] = []
    for line in story.splitlines():
        if line and not line.startswith("#"):
            shown.extend(play(line))
    if not mark:
        assert not shown, f"an answer without a `----`: {shown}"
        return story + "\n"
    return "\n".join([story, "----", *shown]) + "\n"
