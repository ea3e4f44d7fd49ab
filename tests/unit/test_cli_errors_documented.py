"""Every reason in the code is explained in docs/errors.md, and none there is made up."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_CODE = re.compile(r'\breason\s*=\s*"([A-Z][A-Z_]{2,})"')
IN_DOCS = re.compile(r"^\|([^|]+)\|", re.MULTILINE)


def reasons_in_code() -> set[str]:
    files = [f for f in ROOT.glob("services/**/*.py") if "api" not in f.relative_to(ROOT).parts]
    return {reason for file in files for reason in IN_CODE.findall(file.read_text())}


def test_every_reason_is_explained() -> None:
    cells = " ".join(IN_DOCS.findall((ROOT / "docs/errors.md").read_text()))
    documented = set(re.findall(r"`([A-Z_]+)`", cells))
    # Decisions of the scaler carry reasons too; they are no errors.
    errors = {r for r in reasons_in_code() if r not in {"FIXED"}}
    assert errors - documented == set(), "explain these in docs/errors.md"
