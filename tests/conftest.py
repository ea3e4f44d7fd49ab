"""What whole test suites share: hypothesis settings, no logging set up, and real etcd servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Makes `tests.support` importable however pytest was started.
sys.path.insert(0, str(Path(__file__).parent.parent))

from stoker.common import logs
from tests.support.etcd import EtcdCluster, EtcdServer

# The same examples on every run, and no verdict by wall clock: other tests may hold the cores.
hypothesis.settings.register_profile("stoker", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("stoker")


@pytest.fixture(autouse=True)
def _no_logging_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run within a test set up logging for the whole process: the tests that follow would hear nothing."""
    monkeypatch.setattr(logs, "setup", lambda *_, **__: None)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One fresh server for a test module; tests in it keep to prefixes of their own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def etcd_alone(tmp_path: Path) -> Iterator[EtcdServer]:
    """One fresh server for one test, to kill and freeze."""
    server = EtcdServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three fresh members for one test, to kill and freeze."""
    cluster = EtcdCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
