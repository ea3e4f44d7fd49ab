"""Envoy before a router: prints its configuration, or runs it.

python -m stoker.router.envoy --listen 127.0.0.1:7382 --set listen.ext_authz=127.0.0.1:7381 [--run FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
import yaml

from stoker.common.config import load
from stoker.common.errors import StokerError
from stoker.router.config import RouterConfig
from stoker.router.envoy.binary import binary, command
from stoker.router.envoy.bootstrap import bootstrap


def main() -> None:
    """Parse and print, or become Envoy."""
    parser = argparse.ArgumentParser(prog="python -m stoker.router.envoy", description=__doc__.splitlines()[0])
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where Envoy serves the OpenAI API")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the router's settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one of the router's settings"
    )
    parser.add_argument("--threads", type=int, default=0, help="Envoy's worker threads; 0 for one a core")
    parser.add_argument(
        "--run", type=Path, metavar="FILE", help="write the configuration there, and run Envoy with it"
    )
    options = parser.parse_args()
    try:
        made = bootstrap(load(RouterConfig, options.config, options.set), options.listen)
        if options.run is None:
            sys.stdout.write(yaml.safe_dump(made, sort_keys=False))
            return
        program = binary()
    except StokerError as error:
        sys.exit(f"error: {error.message}")
    options.run.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2))
    os.execv(program, command(program, options.run, options.threads))  # noqa: S606 - it takes this process's place, pid and log


if __name__ == "__main__":
    main()
