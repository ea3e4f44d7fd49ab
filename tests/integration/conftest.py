"""What tests of the registry share: one on an etcd that is empty, and a client of it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from stoker.etcd import EtcdClient
from stoker.registry.client import RegistryClient
from stoker.registry.core import keys
from tests.support.etcd import EtcdServer
from tests.support.registry import RegistryUnderTest, config


@pytest.fixture
async def registry(etcd: EtcdServer) -> AsyncIterator[RegistryUnderTest]:
    async with EtcdClient([etcd.endpoint]) as client:
        await client.delete(keys.PREFIX, prefix=True)
    async with RegistryUnderTest(config(etcd.endpoint)) as running:
        yield running


@pytest.fixture
async def client(registry: RegistryUnderTest) -> AsyncIterator[RegistryClient]:
    async with RegistryClient([registry.endpoint], rng=random.Random(1)) as calls:
        yield calls
