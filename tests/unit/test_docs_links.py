"""Every relative link in the documentation leads somewhere, and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def linked(page: Path) -> list[tuple[Path, str]]:
    """Files that a page's relative links name, each with its anchor."""
    found = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z][a-z0-9+.-]*:", link):
            path, _, anchor = link.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", CODE.sub(lambda code: code[0].strip("`"), page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [str(target) for target, _ in linked(page) if not target.exists()]
    assert not broken
    lost = [
        f"{target.name}#{anchor}"
        for target, anchor in linked(page)
        if anchor and target.suffix == ".md" and anchor not in anchors(target)
    ]
    assert not lost


@pytest.mark.parametrize("index", ["docs/README.md", "docs/adr/README.md"])
def test_an_index_leaves_no_page_out(index: str) -> None:
    page = ROOT / index
    assert set(page.parent.glob("*.md")) - {target for target, _ in linked(page)} == {page}
