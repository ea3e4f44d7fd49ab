"""Only the tokenizer that was announced is used, whatever an agent or the disk holds."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models

from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.common.backoff import Backoff
from stoker.common.fingerprint import fingerprint
from stoker.router import core
from stoker.router.fleet.pools import Pool, Target
from stoker.router.prompts import tokenizer_store
from stoker.router.prompts.tokenizer_store import TokenizerStore
from tests.support.router import replica
from tests.support.waiting import eventually

WHOLE = {"tokenizer.json": Tokenizer(models.BPE({"a": 0}, [])).to_str().encode()}
OTHER = {"tokenizer.json": Tokenizer(models.BPE({"b": 0}, [])).to_str().encode()}


class Agent(node_pb2_grpc.NodeServiceServicer):
    """Hands out files."""

    def __init__(self) -> None:
        self.files = dict(WHOLE)
        self.asked = 0

    async def FetchTokenizer(
        self, request: node_pb2.FetchTokenizerRequest, context: Any
    ) -> AsyncIterator[node_pb2.FetchTokenizerResponse]:
        self.asked += 1
        for name, data in self.files.items():
            yield node_pb2.FetchTokenizerResponse(name=name, data=data)

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.GetNodeResponse:
        raise NotImplementedError

    def TailLog(self, request: node_pb2.TailLogRequest, context: Any) -> AsyncIterator[node_pb2.TailLogResponse]:
        raise NotImplementedError


@pytest.fixture
async def agent() -> AsyncIterator[tuple[Agent, Target, grpc.aio.Channel]]:
    servicer, server = Agent(), grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = Target(replica("a", "http://a", sha256=fingerprint(WHOLE)), pool=Pool("tiny", core.Fleet()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, target, channel
    await server.stop(None)


async def test_files_of_another_fingerprint_are_refused_until_right_ones_come(
    agent: tuple[Agent, Target, grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servicer, target, channel = agent
    monkeypatch.setattr(tokenizer_store, "_BACKOFF", Backoff(first_s=0.01, max_s=0.01))
    store = TokenizerStore(lambda _: channel, str(tmp_path), random.Random(0))
    copy = tmp_path / fingerprint(WHOLE) / "tokenizer.json"
    servicer.files = OTHER
    with capture_logs() as logs:
        store.want(target)
        await eventually(lambda: servicer.asked >= 3, "it tries again")
        assert store.get(fingerprint(WHOLE)) is None
        assert not copy.exists()
        servicer.files = WHOLE
        await eventually(copy.exists, "the right files are kept")
        assert store.get(fingerprint(WHOLE)) is not None
    refused = [entry for entry in logs if entry["event"] == "tokenizer.refused"]
    assert refused
    assert all(entry["log_level"] == "error" for entry in refused)
    await store.close()


async def test_a_damaged_copy_on_disk_is_fetched_anew(
    agent: tuple[Agent, Target, grpc.aio.Channel], tmp_path: Path
) -> None:
    servicer, target, channel = agent
    copy = tmp_path / fingerprint(WHOLE) / "tokenizer.json"
    copy.parent.mkdir()
    copy.write_bytes(WHOLE["tokenizer.json"][:-1])

    async def obtain() -> None:
        store = TokenizerStore(lambda _: channel, str(tmp_path), random.Random(0))
        store.want(target)
        await eventually(lambda: store.get(fingerprint(WHOLE)) is not None and copy.exists(), "it is ready and kept")
        await store.close()
        assert copy.read_bytes() == WHOLE["tokenizer.json"]
        assert servicer.asked == 1

    await obtain()
    await obtain()  # the good copy saves a fetch
