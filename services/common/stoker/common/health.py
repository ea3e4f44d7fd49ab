"""`python -m stoker.common.health HOST:PORT`: exit 0 where a service says SERVING, 1 where not.

For container health checks and `ExecStartPost`, which have no gRPC client of their own. For a service with TLS
set STOKER_TLS_CA, and STOKER_TLS_CERTIFICATE and STOKER_TLS_KEY where it asks for a certificate.
"""

from __future__ import annotations

import asyncio
import sys

from stoker.common import rpc, tls
from stoker.common.errors import StokerError

_PATIENCE_S = 3.0


def main() -> None:
    """Exit 0, 1, or 2 without exactly one address or with certificates that cannot be used."""
    if len(sys.argv) != 2 or ":" not in sys.argv[1]:
        sys.stderr.write(f"usage: python -m {__spec__.name} HOST:PORT\n")
        sys.exit(2)
    try:
        sys.exit(0 if asyncio.run(_serving(sys.argv[1])) else 1)
    except StokerError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(2)


async def _serving(target: str) -> bool:
    return await rpc.wait_serving(target, _PATIENCE_S, tls.from_environment())


if __name__ == "__main__":
    main()
