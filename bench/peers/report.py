"""One table of everything measured, and the same as JSON. What could not run is a row with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from bench.peers.quality import Standing
from bench.peers.speed import MANY, Speed


@dataclass
class Report:
    """All results of one run."""

    about: dict[str, Any]
    quality: dict[str, list[Standing]] = field(default_factory=dict)
    """By workload."""
    speed: list[Speed] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Reasons, by contender."""

    def value(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "about": self.about,
            "quality": {name: [_quality(s) for s in standings] for name, standings in self.quality.items()},
            "speed": [asdict(speed) for speed in self.speed],
            "not_run": self.not_run,
        }

    def table(self) -> Table:
        """As people read it; the best of each column of a section is bold."""
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("measured", "routed by"):
            shown.add_column(column)
        for column in ("hit rate", "p50", "p99", "requests/s"):
            shown.add_column(column, justify="right")
        shown.add_column("errors, notes")
        for workload, standings in self.quality.items():
            self._section(shown, f"{workload}, TTFT", [_quality(s) for s in standings], "{:.0f} ms", "{:.2f}")
        for size in dict.fromkeys(speed.prompt_bytes for speed in self.speed):
            rows = [_speed(speed) for speed in self.speed if speed.prompt_bytes == size]
            self._section(shown, f"{_bytes(size)} prompts", rows, "{:.2f} ms", "{:,.0f}")
        return shown

    def legend(self) -> str:
        """How to read the table."""
        return (
            "Workloads: p50 and p99 are times to the first token; hit rates are the engines' own counters. "
            f"Prompts by size: engines answer at once, requests/s and p99 at {MANY} clients, p50 at one. "
            "Medians over rounds, all in turns before the same engines."
        )

    def _section(self, shown: Table, title: str, rows: Sequence[Mapping[str, Any]], times: str, rate: str) -> None:
        ranked = [row for row in rows if row["ranked"]]
        best = {
            column: pick((row[column] for row in ranked if row[column] is not None), default=None)
            for column, pick in (("hit_rate", max), ("p50_ms", min), ("p99_ms", min), ("requests_per_s", max))
        }
        forms = {"hit_rate": "{:.3f}", "p50_ms": times, "p99_ms": times, "requests_per_s": rate}

        def cell(row: Mapping[str, Any], column: str) -> str:
            value = row[column]
            if value is None:
                return "–"
            text = forms[column].format(value)
            return f"[bold]{text}[/]" if row["ranked"] and value == best[column] else text

        for place, row in enumerate(rows):
            failed = f"{row['errors']} errors" if row["errors"] else ""
            note = ", ".join(part for part in (failed, row["note"]) if part)
            shown.add_row(title if place == 0 else "", row["name"], *(cell(row, column) for column in forms), note)
        for name, reason in self.not_run.items():
            shown.add_row("", name, "–", "–", "–", "–", f"not run: {reason}")
        shown.add_section()


def _quality(standing: Standing) -> dict[str, Any]:
    figures = standing.figures()
    failed = bool(standing.failure)
    return {
        "name": standing.contender.name,
        "hit_rate": figures.hit_rate if figures else None,
        "p50_ms": figures.ttft_p50_ms if figures else None,
        "p99_ms": figures.ttft_p99_ms if figures else None,
        "requests_per_s": figures.requests_per_s if figures else None,
        "requests": figures.requests if figures else 0,
        "errors": figures.errors if figures else 0,
        "rounds": len(standing.rounds),
        "hit_rates": [run.hit_rate for run in standing.rounds],
        "ranked": not failed and not (figures and figures.errors),
        "note": standing.failure,
    }


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "name": speed.name,
        "hit_rate": None,
        "p50_ms": speed.one_client_p50_ms,
        "p99_ms": speed.p99_ms,
        "requests_per_s": speed.requests_per_s,
        "errors": speed.errors,
        "ranked": speed.ranked and not speed.errors,
        "note": speed.note,
    }


def _bytes(size: int) -> str:
    return f"{size / 1000:.0f} KB" if size >= 1000 else f"{size} B"
