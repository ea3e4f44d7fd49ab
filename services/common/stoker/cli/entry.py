"""What `stoker` runs first: Ctrl-C ends it in one line also while the rest is being loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from stoker.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was started\n")
        sys.exit(130)
    command.main()
