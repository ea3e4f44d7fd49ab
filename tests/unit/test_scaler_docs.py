"""The operators' page names every setting and every reason."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

from stoker.scaler.core.policy import Policy
from stoker.scaler.core.values import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "scaler.md").read_text()


def rows() -> dict[str, str]:
    """By setting, what the page's table gives as its default."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if not line.startswith("| `") or len(cells) != 3:
            continue
        names = [name.strip("`") for name in cells[0].lstrip("| ").split(", ")]
        section = names[0].rpartition(".")[0]
        defaults = [each.strip() for each in cells[1].replace(",000", "000").replace(",400", "400").split(",")]
        for place, name in enumerate(names):
            whole = name if "." in name or not section else f"{section}.{name}"
            found[whole] = defaults[place] if len(defaults) == len(names) else defaults[0]
    return found


def test_every_setting_is_there_with_its_default() -> None:
    said = rows()
    for part in fields(Policy):
        value = getattr(Policy(), part.name)
        if part.name == "paused":
            continue
        settings = (
            {f"{part.name}.{f.name}": getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
        )
        for name, default in (settings or {part.name: value}).items():
            assert name in said, name
            if isinstance(default, bool) or default is None or isinstance(default, str | tuple):
                continue
            assert float(said[name]) == float(default), name


def test_every_reason_is_explained() -> None:
    assert not [reason for reason in Reason if f"`{reason}`" not in PAGE]
