"""`python -m stoker.common.health HOST:PORT`: exit 0 where a service says SERVING, 1 where not.

For container health checks and `ExecStartPost`, which have no gRPC client of their own.
"""

from __future__ import annotations

import asyncio
import sys

from stoker.common import rpc

_PATIENCE_S = 3.0


def main() -> None:
    """Exit 0, 1, or 2 without exactly one address."""
    if len(sys.argv) != 2 or ":" not in sys.argv[1]:
        sys.stderr.write(f"usage: python -m {__spec__.name} HOST:PORT\n")
        sys.exit(2)
    sys.exit(0 if asyncio.run(rpc.wait_serving(sys.argv[1], _PATIENCE_S)) else 1)


if __name__ == "__main__":
    main()
