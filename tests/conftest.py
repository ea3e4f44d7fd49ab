"""Fixtures for whole test suites: real etcd servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Makes `tests.support` importable however pytest was started.
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.etcd import EtcdCluster, EtcdServer


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
