"""`stoker` in this process, as a script sees it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from stoker.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `stoker ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["stoker", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON that `stoker ARGUMENTS` prints; it must succeed."""
    assert run(monkeypatch, *arguments, "-o", "json") == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value
