"""Drawings that verbs write: `--svg` and `--html`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.output import Output
from stoker.common.errors import InvalidRequest

if TYPE_CHECKING:
    from stoker.planner.drawing.scene import Scene

SvgOption = Annotated[
    Path | None, typer.Option("--svg", help="Draw racks, power and fabric into this SVG.", show_default=False)
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", help="Draw them into this page: one file, names under the pointer.", show_default=False),
]


class View(StrEnum):
    """What is drawn."""

    ALL = "all"
    RACKS = "racks"
    FABRIC = "fabric"


ViewOption = Annotated[View, typer.Option("--view", help="What the drawing shows.")]
Table = tuple[str, Sequence[Sequence[str]]]
"""A title, and rows of which the first is the head."""


def write(
    out: Output,
    scene: Callable[[], Scene],
    svg: Path | None,
    html: Path | None,
    *,
    view: View = View.ALL,
    tables: Sequence[Table] = (),
) -> None:
    """Write what was asked for; `scene` is made only then, and `tables` follow the drawing on a page."""
    if svg is None and html is None:
        return
    from stoker.planner.drawing import page

    made, shown = scene(), page.View(view.value)
    if svg is not None:
        _write(out, "--svg", svg, page.drawn(made, shown))
    if html is not None:
        _write(out, "--html", html, page.page(made, tables, shown))


def _write(out: Output, option: str, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest.field(option, f"cannot write {path}: {error.strerror}; name another file") from error
    out.note(f"drawn into {path}")
