"""What these tests share: a registry on an etcd that is empty and a client of it, and one real vLLM."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stoker.etcd import EtcdClient
from stoker.registry.client import RegistryClient
from stoker.registry.core import keys
from tests.support.engines import RunningEngine, running_engine
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningEngine]:
    """A vLLM for all tests that only ask it, in the session's event loop: it takes longer to start than they do."""
    args = ["--max-model-len", "8192", "--enforce-eager", "--trust-request-chat-template"]
    async with running_engine("vllm", tmp_path_factory.mktemp("vllm"), args=args) as running:
        yield running
