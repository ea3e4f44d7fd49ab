"""Each test that docs/faults.md names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"
NAMED = sorted(set(re.findall(r"`((?:\w+/)+test_\w+\.py)::(test_\w+)`", PAGE.read_text())))
FILES = sorted(set(re.findall(r"`((?:core/)?[a-z_]+\.py)`", PAGE.read_text())))
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| fault")]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_a_named_test_exists(path: str, test: str) -> None:
    assert test in functions(ROOT / "tests" / path)


@pytest.mark.parametrize("path", FILES)
def test_a_named_file_exists(path: str) -> None:
    assert (ROOT / "services/router/stoker/router" / path).is_file()


def test_each_fault_has_one() -> None:
    assert len(ROWS) >= 20
    assert [row for row in ROWS if "::test_" not in row] == []
