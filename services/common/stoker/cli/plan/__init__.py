"""`stoker plan`: from a power envelope and a model to racks, GPUs and placements. On files, offline, and on a fleet
that runs.

Each file of verbs here has an `add_to(app)`.
"""

from __future__ import annotations

import typer

from stoker.cli.plan import capacity, diff, explain, facility, live, place, sizing

app = typer.Typer(
    help="Plan capacity and placements: what a facility can power, what a model needs, which GPUs each replica gets.",
    no_args_is_help=True,
)


@app.callback()
def _common() -> None:
    pass


facility.add_to(app)
capacity.add_to(app)
sizing.add_to(app)
place.add_to(app)
diff.add_to(app)
explain.add_to(app)
live.add_to(app)
